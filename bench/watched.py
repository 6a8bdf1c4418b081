"""A training under hvdlaunch, watched from outside, for faults.py, soak.py and elastic.py."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

PROGRAM = ["-m", "hvdtrain.effnet"]
TRAIN = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "32", "--run", "r"]
POLL_S = 0.005
PATIENCE_S = 180.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line that hvdlaunch or a rank wrote to standard error."""

    at_s: float  # on time.monotonic()
    text: str


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a rank is, from its line in the run folder."""

    attempt: int  # the rank's process
    step: int  # 0 before the first


class Watched:
    """`hvdlaunch run` of a training of digits in a folder; its end kills every process of it."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        options: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        words: Sequence[str],
        fault: str = "",
    ) -> None:
        self.run_folder = folder / "runs" / "effnet" / "r"
        self.lines: list[Line] = []
        self._first_steps: dict[int, int] = {}  # the first one seen, by attempt
        self._folder, self._program = folder, list(program)
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        start = [sys.executable, "-m", "launch", "run", "-np", str(ranks), "--gpus", "none", *as_root, *options]
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*start, "--", sys.executable, *program, *TRAIN, *words],
            cwd=folder,
            env={**os.environ, "HVDTRAIN_FAULT": fault},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print("\n".join(line.text for line in self.lines), file=sys.stderr)
        self.process.kill()
        self.process.wait()
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.lines.append(Line(at_s=time.monotonic(), text=text.rstrip("\n")))

    def until(self, condition: Callable[[], Answer | None], within_s: float = PATIENCE_S) -> Answer:
        """Poll `condition` until its answer is neither None nor false. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if answer := condition():
                return answer
            time.sleep(POLL_S)
        raise TimeoutError(f"{condition} not within {within_s:g} s")

    def newest_line(self, beginning: str) -> Line | None:
        """The newest line with this beginning."""
        return next((line for line in reversed(self.lines) if line.text.startswith(beginning)), None)

    def at(self, rank: int) -> At | None:
        """Where a rank is; None while it is unknown."""
        ranks = self.run_folder / "ranks"  # each attempt creates it again
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = (ranks / f"rank-{rank}.at").read_text().split()
            pid = json.loads((ranks / f"rank-{rank}.json").read_text())["pid"]
            return At(attempt=pid, step=int(words[1]) if words[0] == "step" else 0)
        return None

    def reaches(self, step: int, *, rank: int = 0) -> float | None:
        """The current time if a rank has begun this step."""
        at = self.at(rank)
        return time.monotonic() if at is not None and at.step >= step else None

    def begins(self, rank: int, *, after: At) -> At | None:
        """Where a rank is, if it is in a step of a later attempt than `after`."""
        at = self.at(rank)
        return at if at is not None and at.attempt != after.attempt and at.step else None

    def goes_on(self, rank: int, *, after: At) -> float | None:
        """The current time if a later attempt than `after` has done a step."""
        at = self.begins(rank, after=after)
        if at is None:
            return None
        return time.monotonic() if at.step > self._first_steps.setdefault(at.attempt, at.step) else None

    def pid(self, rank: int) -> int | None:
        """The process id of a rank, once its process is the training."""
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                its_rank = process.environ().get("OMPI_COMM_WORLD_RANK")
                if process.cmdline()[1 : 1 + len(self._program)] == self._program and its_rank == str(rank):
                    return process.pid
        return None

    def signal(self, number: signal.Signals, *, rank: int) -> bool:
        """Send a signal to a rank; whether the rank is alive."""
        pid = self.pid(rank)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def left(self) -> list[psutil.Process]:
        """The processes that are alive: hvdlaunch, mpirun, ranks and loader workers."""
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == self._folder:
                    alive.append(process)
        return alive

    def gone(self) -> float:
        """Wait until no process is alive; the time."""
        self.until(lambda: not self.left())
        return time.monotonic()

    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        return dict(json.loads((self.run_folder / "result.json").read_text()))

    def weights(self) -> set[str]:
        """The hashes of the final weights of all ranks."""
        files = self.run_folder.glob("ranks/rank-*.json")
        return {json.loads(file.read_text())["weights_sha256"] for file in files}
