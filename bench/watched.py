"""A training under hvdlaunch, watched from outside; for faults.py and soak.py."""

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
from typing import Any, TypeVar

import psutil

PROGRAM = ["-m", "hvdtrain.effnet"]
TRAIN = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "32", "--run", "r"]
POLL_S = 0.005
PATIENCE_S = 180.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Something that hvdlaunch or a rank said on standard error."""

    at_s: float  # on time.monotonic()
    text: str


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a rank is, as its line in the run folder tells."""

    attempt: int  # its process
    step: int  # 0 before the first


class Watched:
    """`hvdlaunch run` of a training of digits in a folder; at the end nothing of it lives."""

    def __init__(
        self, folder: Path, *, ranks: int, options: Sequence[str] = (), words: Sequence[str], fault: str = ""
    ) -> None:
        self.run_folder = folder / "runs" / "effnet" / "r"
        self.lines: list[Line] = []
        self._first_steps: dict[int, int] = {}  # seen of each attempt
        self._folder = folder
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        start = [sys.executable, "-m", "launch", "run", "-np", str(ranks), "--gpus", "none", *as_root, *options]
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*start, "--", sys.executable, *PROGRAM, *TRAIN, *words],
            cwd=folder,
            env={**os.environ, "HVDTRAIN_FAULT": fault},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Watched":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print("\n".join(line.text for line in self.lines), file=sys.stderr)
        self.process.kill()
        self.process.wait()
        for one in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.lines.append(Line(at_s=time.monotonic(), text=text.rstrip("\n")))

    def until(self, condition: Callable[[], Answer | None], within_s: float = PATIENCE_S) -> Answer:
        """The first answer that is not None or false; TimeoutError where there is none."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if answer := condition():
                return answer
            time.sleep(POLL_S)
        raise TimeoutError(f"{condition} not within {within_s:g} s")

    def said(self, beginning: str) -> Line | None:
        """The newest line that begins so."""
        return next((line for line in reversed(self.lines) if line.text.startswith(beginning)), None)

    def at(self, rank: int) -> At | None:
        """Where a rank is; None while nothing tells."""
        ranks = self.run_folder / "ranks"  # each attempt makes it anew
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = (ranks / f"rank-{rank}.at").read_text().split()
            pid = json.loads((ranks / f"rank-{rank}.json").read_text())["pid"]
            return At(attempt=pid, step=int(words[1]) if words[0] == "step" else 0)
        return None

    def reaches(self, step: int, *, rank: int = 0) -> float | None:
        """The time, if a rank has begun this step."""
        at = self.at(rank)
        return time.monotonic() if at is not None and at.step >= step else None

    def begins(self, rank: int, *, after: At) -> At | None:
        """Where a rank is in a step of a later attempt than this one."""
        at = self.at(rank)
        return at if at is not None and at.attempt != after.attempt and at.step else None

    def goes_on(self, rank: int, *, after: At) -> float | None:
        """The time, if a later attempt than this one has done a step."""
        at = self.begins(rank, after=after)
        if at is None:
            return None
        return time.monotonic() if at.step > self._first_steps.setdefault(at.attempt, at.step) else None

    def pid(self, rank: int) -> int | None:
        """The rank's process, from the moment on that it is the training."""
        for one in self.left():
            with contextlib.suppress(psutil.Error):
                of = one.environ().get("OMPI_COMM_WORLD_RANK")
                if one.cmdline()[1:3] == PROGRAM and of == str(rank):
                    return one.pid
        return None

    def signal(self, number: signal.Signals, *, rank: int) -> bool:
        """Send a rank a signal, if it lives."""
        pid = self.pid(rank)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def left(self) -> list[psutil.Process]:
        """What lives of it: hvdlaunch, mpirun, ranks and loader workers."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE and Path(one.cwd()) == self._folder:
                    found.append(one)
        return found

    def gone(self) -> float:
        """The time at which nothing of it lives any more."""
        self.until(lambda: not self.left())
        return time.monotonic()

    def result(self) -> dict[str, Any]:
        """What the run has left as its result."""
        return dict(json.loads((self.run_folder / "result.json").read_text()))

    def weights(self) -> set[str]:
        """The hashes of the final weights of all ranks."""
        files = self.run_folder.glob("ranks/rank-*.json")
        return {json.loads(file.read_text())["weights_sha256"] for file in files}
