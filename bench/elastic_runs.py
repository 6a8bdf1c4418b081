"""Trainings whose ranks note their steps, for elastic.py: who is alive, and how far they are; and what was measured."""

import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pairs import HERE, RESULTS
from watched import Watched

IMAGES = 1438  # of the digits' training split
ENDLESS = ["--epochs", "100000"]
BATCH = {"efficientnet_tiny": 32, "efficientnet_b0": 16}  # per rank
WARMUP_STEPS = 10

Note = dict[str, Any]
Sample = dict[str, Any]


class Noted(Watched):
    """A training of digits by bench/elastic_rank.py."""

    def __init__(self, folder: Path, *, ranks: int, options: Sequence[str], words: Sequence[str]) -> None:
        self.notes: dict[int, list[Note]] = defaultdict(list)  # by process, as they came
        self._read_bytes: dict[Path, int] = defaultdict(int)
        self._notes = folder / "notes"
        self._ended = set[int]()  # processes
        self._before_s = _busy_s() - time.process_time()
        program = [str(HERE / "elastic_rank.py")]
        super().__init__(folder, ranks=ranks, options=options, program=program, words=words)

    def look(self) -> None:
        """Read what is new in the notes of those that live."""
        for file in self._notes.glob("*.jsonl"):
            pid = int(file.stem)
            if pid in self._ended:
                continue
            if not _is_alive(pid):
                self._ended.add(pid)  # once the rest is read
            with file.open("rb") as notes:
                notes.seek(self._read_bytes[file])
                whole, _, _ = notes.read().rpartition(b"\n")
            if whole:
                self._read_bytes[file] += len(whole) + 1
                self.notes[pid] += map(json.loads, whole.splitlines())

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
        return [pid for pid in self.alive() if self.noted(pid, "took")]

    def alive(self) -> list[int]:
        """All processes of ranks, also those that have not taken a step yet."""
        self.look()
        return [pid for pid in self.notes if pid not in self._ended]

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
        return max((one["epoch"] * IMAGES + int(one["visited"]) for one in taken if one["at_s"] <= before_s), default=0)

    def share(self, epochs: int) -> float:
        """Of a run of so many epochs, what is done."""
        self.look()
        newest = [
            next((one for one in reversed(notes) if one["what"] == "took"), None) for notes in self.notes.values()
        ]
        return max((one["epoch"] * IMAGES + one["visited"] for one in newest if one), default=0) / (epochs * IMAGES)

    def leaves(self) -> int:
        """Have it save and end: the exit status, which is 0 where all has gone well."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        if status:
            print(f"exit status {status}", *(line.text for line in self.lines[-5:]), sep="\n    ", flush=True)
        return status

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


def samples_file(what: str) -> Path:
    return RESULTS / f"elastic-{what}.jsonl"


def samples(what: str) -> list[Sample]:
    """All that were measured so far."""
    file = samples_file(what)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keep(what: str, sample: Sample) -> None:
    samples_file(what).parent.mkdir(parents=True, exist_ok=True)
    with samples_file(what).open("a") as file:
        file.write(json.dumps({"at": time.strftime("%F %T"), **sample}) + "\n")
    print(json.dumps(sample), flush=True)


@contextmanager
def started(model: str, *, ranks: int, options: Sequence[str], words: Sequence[str] = ()) -> Iterator[Noted]:
    """A training in a folder of its own, without an end unless `words` say otherwise."""
    model_words = ["--model", model, "--batch-size-per-rank", str(BATCH[model]), *ENDLESS, *words]
    with (
        tempfile.TemporaryDirectory() as folder,
        Noted(Path(folder), ranks=ranks, options=options, words=model_words) as job,
    ):
        yield job


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})"
