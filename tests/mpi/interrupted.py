"""Runs that are ended at a chosen place and go on, and what must be the same in the end."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.mpi.conftest import PROGRAMS, TIMEOUT_S, command, environment, launcher_of, rank_pids, running_in, wait_until

TINY = ("--data", "digits", "--model", "efficientnet_tiny")
EVERY_STEP = ("--checkpoint-every", "1steps", "--report-every-steps", "3")
WHOLE = (*TINY, "--batch-size-per-rank", "64", "--epochs", "2", *EVERY_STEP)  # 12 steps per epoch at 2 ranks
SHORT = (*WHOLE, "--images=768")  # 6
_OF_THE_MACHINE = re.compile(r"seconds|_per_s|epoch_s|time_s|usage|own_ms")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """One run of `ranks` ranks in folder/runs/SCRIPT/r, and its attempts."""

    folder: Path
    ranks: int
    words: tuple[str, ...]
    script: str = "effnet"

    @property
    def path(self) -> Path:
        return self.folder / "runs" / self.script / "r"

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("checkpoints/step-*"))

    @property
    def _program(self) -> tuple[str, ...]:
        return str(PROGRAMS / "every_option.py"), self.script

    def started(self, *more: str, program: tuple[str, ...] | None = None, **env: str) -> Any:
        """One attempt, as a terminal would start it; one rank has no launcher."""
        words = [*(program or self._program), *self.words, "--run", "r", *more]
        argv = command(launcher_of(self.ranks), self.ranks, words)
        return running_in(self.folder, argv, {**environment(self.folder), **env})

    @property
    def said(self) -> str:
        """What the last attempt has said."""
        return (self.folder / "out").read_text()

    def ended(self, job: subprocess.Popen[str], status: int = 0) -> str:
        """What it said until its end with this status."""
        assert job.wait(TIMEOUT_S) == status, self.said
        return self.said

    def finish(self, *more: str, status: int = 0, **options: Any) -> str:
        """One attempt to its end; what it said."""
        with self.started(*more, **options) as job:
            return self.ended(job, status)

    def killed(self, place: str, *, saved: int, rank: int | None = None, **options: Any) -> None:
        """One attempt whose ranks, or one of them, are killed at a place, when the checkpoint of a step is on disk."""
        with self.hanging(place, saved=saved, **options) as job:
            pids = rank_pids(self.path)
            for pid in pids if rank is None else [pids[rank]]:
                os.kill(pid, signal.SIGKILL)
            job.wait(TIMEOUT_S)
        assert self.checkpoints[-1] == f"step-{saved:09d}"

    @contextlib.contextmanager
    def hanging(self, place: str, *, saved: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """One attempt that goes no further than a place, when the checkpoint of a step is on disk."""
        with self.started(HVDTRAIN_FAULT=f"sleep@rankall:{place}", **options) as job:
            wait_until(lambda: self._runs(job) and f"step-{saved:09d}" in self.checkpoints, TIMEOUT_S)
            yield job

    def asked(self, place: str, *, by: signal.Signals = signal.SIGUSR1, **options: Any) -> str:
        """One attempt that gets a signal while its ranks stand still at a place; what it said when it left with 0."""
        with self.started(HVDTRAIN_FAULT=f"stop@rankall:{place}", **options) as job:
            pids = wait_until(lambda: self._runs(job) and self._stopped(), TIMEOUT_S)
            os.kill(job.pid, by)
            wait_until(lambda: all(_has_pending(pid, by) for pid in pids), 10)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            return self.ended(job)

    def _runs(self, job: subprocess.Popen[str]) -> bool:
        assert job.poll() is None, self.said
        return True

    def _stopped(self) -> list[int] | None:
        pids = rank_pids(self.path)
        with contextlib.suppress(psutil.NoSuchProcess):
            if len(pids) == self.ranks and all(psutil.Process(pid).status() == "stopped" for pid in pids):
                return pids
        return None

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "result.json").read_text()))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    @property
    def weights(self) -> set[str]:
        """The hashes of all ranks' weights at the end."""
        files = [self.path / "ranks" / f"rank-{rank}.json" for rank in range(self.ranks)]
        return {json.loads(file.read_text())["weights_sha256"] for file in files}

    def history(self) -> list[dict[str, Any]]:
        """metrics.jsonl, without what depends on the machine."""
        lines = [line for line in self.lines if line.get("event") != "behind"]
        return [{name: one for name, one in line.items() if not _OF_THE_MACHINE.search(name)} for line in lines]

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """TensorBoard's points, however often they stand there, without what depends on the machine."""
        assert len(list(self.path.glob("events.out.tfevents.*"))) == 1
        events = EventAccumulator(str(self.path), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
        return {
            tag: [(one.step, one.value) for one in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
            if not _OF_THE_MACHINE.search(tag)
        }

    def copied(self, folder: Path, **changes: Any) -> "Runs":
        """The same run in another place."""
        shutil.copytree(self.folder / "runs", folder / "runs")
        return Runs(**{"folder": folder, "ranks": self.ranks, "words": self.words, "script": self.script, **changes})


def files_under(folder: Path) -> dict[str, bytes]:
    """Contents by path, without the lock, which says who has looked last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refusal(said: str) -> str:
    """The one line of a run that was refused."""
    (line,) = [line for line in said.splitlines() if line.startswith("hvdtrain: ")]
    assert "Traceback" not in said
    return line


def same_end(one: Runs, other: Runs, *, whole_history: bool = True) -> None:
    """Weights of the same bits, and logs that do not show where a run was interrupted.

    Where it saved at other steps a report more cuts its history into other pieces: then that of the epochs.
    """
    assert len(one.weights) == 1
    assert one.weights == other.weights
    measured = [name for name in one.result if name.startswith(("eval_", "best_"))]
    for name in ("exit_reason", "steps", "epochs", "skipped_steps", *measured):
        assert one.result[name] == other.result[name], name
    histories = one.history(), other.history()
    steps = [line["step"] for line in histories[0] if not {"epoch", "event"} & line.keys()]
    assert steps == sorted(set(steps))
    curves = one.curves(), other.curves()
    assert all(len(points) == len({step for step, _ in points}) for points in curves[0].values())
    if whole_history:
        assert histories[0] == histories[1]
        assert curves[0] == curves[1]
    else:
        ends = [[line["eval/loss"] for line in history if "epoch" in line] for history in histories]
        assert ends[0] == ends[1]
        assert curves[0]["eval/loss"] == curves[1]["eval/loss"]


def _has_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s+(\w+)", status, re.MULTILINE)]
    return any(mask >> (number - 1) & 1 for mask in pending)
