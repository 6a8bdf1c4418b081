"""Ends the processes that a failed run has left behind on its hosts.

python -m launch.run.supervise.leftovers JOB       ends those on this host, and prints their number
"""

import contextlib
import os
import signal
import sys
import time

from launch.process import processes, stat, variables, wait_for_last_words

GONE_S = 3.0  # SIGKILL has to wait for drivers
MARK = "hvdlaunch-ended "


def end_here(job: str) -> int:
    """Kill a job's ranks and their child processes on this host; return the number of processes."""
    wait_for_last_words(lambda pid, _: _belongs_to(pid, job))
    found, mine, pid = processes(), set(), os.getpid()
    while pid in found:  # this process and its ancestors
        mine.add(pid)
        pid = found[pid].parent
    pids = [pid for pid in found if pid not in mine and _belongs_to(pid, job)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
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
