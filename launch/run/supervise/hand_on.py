"""Hands SIGUSR1 on to the ranks of a run, to each as soon as it catches the signal, which would kill it before.

python -m launch.run.supervise.hand_on REPORT RANK...       does so for these ranks of the run, which are on this host
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from launch.process import BackgroundProcess, Stat, processes, variables
from launch.run.start.render import PreparedRun

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0  # between looks
ABSENT_S = 60.0  # without any rank the run has ended, or has never started
USR1_BIT = 1 << (signal.SIGUSR1 - 1)


class HandOn:
    """Processes that hand SIGUSR1 on, one for each host of a run."""

    def __init__(self, prepared: PreparedRun, report: Path) -> None:
        self._prepared, self._report = prepared, str(report)
        self._processes: list[BackgroundProcess] = []

    def start(self) -> None:
        """Hand a signal on to every rank; one that still waits for an earlier signal gets only this one."""
        self.end()
        launcher, plan = self._prepared.launcher, self._prepared.plan
        for host, slots in groupby(plan.slots, lambda slot: slot.host):
            ranks = [str(slot.rank) for slot in slots]
            words = [launcher.python, "-P", "-m", "launch.run.supervise.hand_on", self._report, *ranks]
            if host not in plan.local:
                words = launcher.ssh.command(host, words, str(Path.cwd()))
            self._processes.append(BackgroundProcess(words))

    def end(self) -> None:
        """End these processes; one on another host ends by itself after the ranks."""
        for process in self._processes:
            process.end()
        self._processes = []


def hand_on(report: str, ranks: Collection[int]) -> None:
    """Send SIGUSR1 to these ranks, which are on this host, then return; also if none is there for ABSENT_S."""
    waiting = set(ranks)
    pause_s, until = FIRST_PAUSE_S, time.monotonic() + ABSENT_S
    while waiting and time.monotonic() < until:
        found = processes()
        pids = {rank: pid for rank, pid in ranks_of(report, found).items() if rank in waiting}
        for rank, pid in pids.items():
            for receiver in catching(pid, found):
                waiting.discard(rank)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(receiver, signal.SIGUSR1)
        if pids:
            until = time.monotonic() + ABSENT_S
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, MAX_PAUSE_S)


def ranks_of(report: str, found: Mapping[int, Stat]) -> dict[int, int]:
    """Return the process of each rank of a run: the first one with bind's variables, which others inherit."""
    report_variable, ranks = os.fsencode(f"HVDLAUNCH_REPORT={report}"), dict[int, int]()
    for pid in sorted(found, key=lambda pid: (-found[pid].started_s, -pid)):
        own = variables(pid)
        rank = next((each.removeprefix(b"RANK=") for each in own if each.startswith(b"RANK=")), b"")
        if report_variable in own and rank.isdigit():
            ranks[int(rank)] = pid
    return ranks


def catching(pid: int, found: Mapping[int, Stat]) -> Iterator[int]:
    """Yield the process if it catches SIGUSR1, else those of its children that do: a script may wait for them."""
    status = ""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if match is not None and int(match[1], 16) & USR1_BIT:
        yield pid
        return
    for child, facts in found.items():
        if facts.parent == pid:
            yield from catching(child, found)


if __name__ == "__main__":
    hand_on(sys.argv[1], [int(rank) for rank in sys.argv[2:]])
