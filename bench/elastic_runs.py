"""Trainings whose ranks note their steps, for elastic.py: who is alive, how far they are, what they cost."""

import itertools
import json
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from pairs import HERE
from watched import Watched

IMAGES = 1438  # of the digits' training split
ENDLESS = ["--epochs", "100000"]

Note = dict[str, Any]


class Noted(Watched):
    """A training of digits by bench/elastic_rank.py."""

    def __init__(self, folder: Path, *, ranks: int, options: Sequence[str], words: Sequence[str]) -> None:
        self.notes: dict[int, list[Note]] = defaultdict(list)  # by process, as they came
        self._read_bytes: dict[Path, int] = defaultdict(int)
        self._notes = folder / "notes"
        self._before_s = _busy_s() - time.process_time()
        program = [str(HERE / "elastic_rank.py")]
        super().__init__(folder, ranks=ranks, options=options, program=program, words=words)

    def look(self) -> None:
        """Read what is new in the notes."""
        for file in self._notes.glob("*.jsonl"):
            with file.open("rb") as notes:
                notes.seek(self._read_bytes[file])
                whole, _, _ = notes.read().rpartition(b"\n")
            if whole:
                self._read_bytes[file] += len(whole) + 1
                self.notes[int(file.stem)] += map(json.loads, whole.splitlines())

    def taken(self, pid: int, *, after_s: float = 0.0) -> list[Note]:
        """The steps that a process has taken since then."""
        found = []
        for one in reversed(self.notes[pid]):
            if one["at_s"] <= after_s:
                break
            if one["what"] == "took":
                found.append(one)
        return found[::-1]

    def noted(self, pid: int, what: str, *, after_s: float = 0.0) -> Note | None:
        """The first note of that kind since then."""
        return next((one for one in self.notes[pid] if one["what"] == what and one["at_s"] > after_s), None)

    def training(self) -> list[int]:
        """The processes that have taken a step, and are alive."""
        self.look()
        return [pid for pid in list(self.notes) if self.noted(pid, "took") and _is_alive(pid)]

    def launched(self, pid: int) -> int:
        """The rank that the process was started as."""
        start = self.noted(pid, "start")
        assert start is not None
        return int(start["rank"])

    def all_take(self, ranks: int, *, steps: int = 1, after_s: float = 0.0) -> list[int] | None:
        """The processes once there are so many, each with so many steps since then."""
        pids = self.training()
        ready = len(pids) == ranks and all(len(self.taken(pid, after_s=after_s)) >= steps for pid in pids)
        return pids if ready else None

    def images(self, *, before_s: float) -> int:
        """Training images that were completed by then, each once an epoch."""
        taken = [one for of_one in self.notes.values() for one in of_one if one["what"] == "took"]
        return max(one["epoch"] * IMAGES + one["visited"] for one in taken if one["at_s"] <= before_s)

    def leaves(self) -> None:
        """Have it save and end."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        assert status == 0, self.lines[-1].text

    def load(self) -> dict[str, float]:
        """Of this machine: processes that wanted a core in the last minute, and cores that others used meanwhile."""
        passed_s = time.monotonic() - self.started_s
        own_s = time.process_time()
        for process in self.left():
            with suppress(psutil.Error):
                used = process.cpu_times()
                own_s += used.user + used.system + used.children_user + used.children_system
        return {"load": os.getloadavg()[0], "others_cores": (_busy_s() - own_s - self._before_s) / passed_s}


def step_s(taken: Iterable[Note], clock: str = "at_s") -> list[float]:
    """The times of steps, by the clock or by the core, but for those that begin an epoch."""
    return [
        one[clock] - before[clock]
        for before, one in itertools.pairwise(taken)
        if one["epoch"] == before["epoch"] and one["step"] == before["step"] + 1
    ]


def median_step_s(job: Noted, pids: Iterable[int], *, after_s: float = 0.0) -> float:
    """Of these processes, since then."""
    return statistics.median(one for pid in pids for one in step_s(job.taken(pid, after_s=after_s)[3:]))


def kill(pid: int) -> float:
    """Kill -9; the time just before."""
    now = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return now


def _is_alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _busy_s() -> float:
    """Of all cores, since the machine's start."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
