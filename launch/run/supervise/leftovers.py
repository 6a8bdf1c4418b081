"""Ends the processes that a failed run has left behind on its hosts.

python -m launch.run.supervise.leftovers JOB       ends those on this host, and prints their number
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence

from launch.errors import HostError, LaunchError
from launch.hosts.host import shown
from launch.hosts.probe import at_once, is_local
from launch.hosts.ssh import Ssh
from launch.process import processes, stat, variables, wait_for_last_words

ANSWER_S = 10.0
GONE_S = 3.0  # SIGKILL has to wait for drivers
MARK = "hvdlaunch-ended "


def end_on(hosts: Sequence[str], job: str, *, ssh: Ssh, python: str, folder: str) -> dict[str, int | LaunchError]:
    """End the processes of a job on all hosts in parallel; return each host's number of processes, or an error."""
    command = [python, "-P", "-m", "launch.run.supervise.leftovers", job]

    def end_there(host: str) -> int | LaunchError:
        if is_local(host):
            return end_here(job)
        try:
            answer = ssh.ask(host, command, folder, mark=MARK, timeout_s=ANSWER_S)
        except LaunchError as error:
            return error
        if not re.fullmatch("[0-9]{1,9}", answer):
            number = f"{shown(answer)} is not a number of killed processes"
            return HostError(f"host {host}: {number}: install the same version there")
        return int(answer)

    return at_once(end_there, hosts)


def end_here(job: str) -> int:
    """Kill a job's ranks and their child processes on this host; return the number of processes."""
    wait_for_last_words(lambda pid, _: _belongs_to(pid, job))
    found, mine, pid = processes(), set(), os.getpid()
    while pid in found:  # this process and its ancestors
        mine.add(pid)
        pid = found[pid].parent
    pids = [pid for pid in found if pid not in mine and _belongs_to(pid, job)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    while any((facts := stat(pid)) and facts.state != "Z" for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(pids)


def _belongs_to(pid: int, job: str) -> bool:
    """Return whether this user's hvdlaunch has started the process; the user's shell may also set HVDLAUNCH_JOB."""
    found = variables(pid)
    has_plan = any(variable.startswith(b"HVDLAUNCH_PLAN=") for variable in found)
    return has_plan and f"HVDLAUNCH_JOB={job}".encode() in found


if __name__ == "__main__":
    print(f"{MARK}{end_here(sys.argv[1])}", flush=True)
