"""A rank that hangs ends itself and the job, and leaves its stacks; a line on disk says what each rank is doing.

The line is `<run>/ranks/rank-<r>.at`: 64 bytes of ASCII, padded with spaces before the line end. It is `start` or
`step 17`, a space, and one of:

    working     in its own code: forward, backward, optimizer
    reading     waiting for samples that come from files, in a step or in an evaluation
    waiting     inside a collective, for the other ranks
    evaluating  in the evaluation after that step
    saving      in the checkpoint after that step
    recovering  closing up after other ranks were lost
    left        it ended by itself

It is written through a shared mapping, so that it survives however the process ends. To read it, split the text at
white space; a missing file says nothing. In a hang every rank but the culprit is waiting.

Disks stall for minutes and go on; computing does not. So reading has a limit of its own, the long one of a first step,
and so do the ranks that wait meanwhile: where samples come from files, a rank that was stopped is found that late. One
that hangs in its own work is not: that limit stays a step's.

The timer is faulthandler's: a thread in C that fires even while the GIL is held. It writes `Timeout (0:01:00)!` and the
stacks of all threads to `<run>/ranks/rank-<r>.err` and ends the process with status 1. The timer of a rank that is
stopped (SIGSTOP) does not run: the others end the job. If the rank is continued after its limit, as mpirun does before
it ends a rank, it leaves its line as it was, and its timer fires within moments.
"""

import contextlib
import faulthandler
import math
import mmap
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

from hvdtrain.safety.files import new_file

FIRST_STEPS = 3  # slow, for they choose kernels and start loader workers
TIMES_MEDIAN = 10
LEAST_S = 60.0
# For reading, a first step, the first batch of an evaluation, a checkpoint, and everything before the first step.
SLOW_S = 600.0
RECOVERY_S = 30.0  # for those that are left to close up after ranks were lost
SLOW_TIMES = 10  # the same, as a multiple of --hang-timeout-s
# The culprit began its work no later than the others began to wait for it, so its timer fires first.
PATIENCE_S = 0.5
# Setting the timer starts a thread: one that fires up to this share of its limit too early is left as it is.
TOO_EARLY = 0.01

_Batch = TypeVar("_Batch")
_LINE_LENGTH = 64  # one cache line: a reader on this host never sees half of it


class Watchdog(Protocol):
    """Notes what its rank begins to do; each call sets a new time limit, or one that is up to TOO_EARLY shorter."""

    step: int | None  # the last one begun, also when off; None before the first

    def starting(self) -> None:
        """Everything before the first step."""

    def working(self, step: int) -> None:
        """A step, numbered as in the log; a second call in the same step starts its limit again."""

    def reading(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        """The same batches, read from files; each may take its time, and then the work goes on with its limit anew."""

    def evaluating(self, step: int) -> None:
        """The next batch of the evaluation after this step; from the second batch on with the limit of a step."""

    def saving(self, step: int) -> None:
        """The checkpoint after this step; on all ranks, since they wait for each other."""

    def recovering(self, step: int | None) -> None:
        """Ranks were lost after this step, None before the first; those that are left close up."""

    def waiting(self, step: int | None) -> None:
        """In a collective, None before the first step; the limit is that of the others' work plus PATIENCE_S.

        It is that of the interrupted work, or in a run that reads files the one of reading.
        """

    def collective(self) -> AbstractContextManager[None]:
        """Inside, the rank waits for the others, with the limit of `waiting`. May be nested."""

    def left(self, step: int | None) -> None:
        """The rank has done its work, None if before the first step; from now on without a limit."""

    def close(self) -> None:
        """The rank leaves after the current step; close the files."""


class _Off:
    step: int | None = None
    collective: Callable[[], AbstractContextManager[None]] = nullcontext

    def starting(self) -> None:
        pass

    def working(self, step: int) -> None:
        self.step = step

    def reading(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        return batches

    def evaluating(self, step: int) -> None:
        self.step = step

    def saving(self, step: int) -> None:
        self.step = step

    def recovering(self, step: int | None) -> None:
        pass

    def waiting(self, step: int | None) -> None:
        pass

    def left(self, step: int | None) -> None:
        pass

    def close(self) -> None:
        pass


OFF: Watchdog = _Off()


def watch(run_folder: Path, rank: int, *, hang_timeout_s: float | None, by_signal: bool = False) -> Watchdog:
    """The watchdog of one rank, one per process; OFF for a timeout of 0.

    `by_signal` ends the process by SIGALRM: that is what MPI tells ranks that outlive it.

    Without a timeout the limit of a step is TIMES_MEDIAN times the median of the last 50, at least LEAST_S.
    """
    if hang_timeout_s == 0:
        return OFF
    return RankWatchdog(run_folder / "ranks", rank, hang_timeout_s=hang_timeout_s, by_signal=by_signal)


def slow_s(hang_timeout_s: float | None) -> float:
    """The limit of what may be slow, with this timeout of a step."""
    return SLOW_S if hang_timeout_s is None else SLOW_TIMES * hang_timeout_s


class RankWatchdog:
    """Writes the line and arms the timer; if the disk is full it goes on without the line, and stacks go to stderr."""

    def __init__(self, folder: Path, rank: int, *, hang_timeout_s: float | None, by_signal: bool = False) -> None:
        self._line = _shared_line(folder / f"rank-{rank}.at")
        self._errors = None
        with contextlib.suppress(OSError):
            self._errors = (folder / f"rank-{rank}.err").open("a")  # keeps what is already in it
        self._by_signal = by_signal
        if by_signal:
            faulthandler.register(signal.SIGALRM, file=self._errors or sys.stderr, chain=True)
        self._timeout_s = hang_timeout_s
        self._durations_s: deque[float] = deque(maxlen=50)
        self.step: int | None = None
        self._doing = "working"
        self._limit_s = self._step_limit_s = self._slow_s = slow_s(hang_timeout_s)
        self._reads = False  # this run reads files
        self._until_s = math.inf  # when the timer fires, on time.monotonic()
        self._timed: tuple[int, float] | None = None  # the last step that began, and when
        self._silent = False  # already in a collective, or left
        self._patient = False  # the timer already has the limit of a rank that waits

    def starting(self) -> None:
        self._begin(None, "working", self._slow_s)

    def working(self, step: int) -> None:
        if self._timed is None or step != self._timed[0]:
            now = time.monotonic()
            if self._timed is not None:
                self._durations_s.append(now - self._timed[1])
            self._timed = (step, now)
            self._step_limit_s = self._next_step_limit_s()
        self._begin(step, "working", self._step_limit_s)

    def reading(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        self._reads = True
        while True:
            self._note(self.step, "reading")
            self._arm(self._long_limit_s())
            batch = next(batches, None)  # after an error the line stays: the rank was reading when it failed
            self._begin(self.step, self._doing, self._limit_s)
            if batch is None:
                return
            yield batch

    def evaluating(self, step: int) -> None:
        is_evaluating = self._doing == "evaluating"
        self._begin(step, "evaluating", self._step_limit_s if is_evaluating else self._long_limit_s())

    def saving(self, step: int) -> None:
        self._begin(step, "saving", self._long_limit_s())

    def recovering(self, step: int | None) -> None:
        self._begin(step, "recovering", RECOVERY_S)

    def waiting(self, step: int | None) -> None:
        self._note(step, "waiting")
        self._wait()

    @contextmanager
    def collective(self) -> Iterator[None]:
        if self._silent:
            yield
            return
        self._silent = True
        self._note(self.step, "waiting")
        if not self._patient:  # once, for batch norm over all ranks runs a hundred collectives per step
            self._patient = True
            self._wait()
        try:
            yield
        finally:
            self._silent = False
        self._note(self.step, self._doing)  # not after an error: the rank was waiting when it failed

    def left(self, step: int | None) -> None:
        self._silent = True
        if self._by_signal:
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            faulthandler.cancel_dump_traceback_later()
        self._until_s = math.inf
        self._note(step, "left")

    def close(self) -> None:
        self.left(self.step)
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._errors is not None:
            self._errors.close()

    def _next_step_limit_s(self) -> float:
        if len(self._durations_s) < FIRST_STEPS:
            return self._slow_s
        if self._timeout_s is not None:
            return self._timeout_s
        return max(LEAST_S, TIMES_MEDIAN * statistics.median(self._durations_s))

    def _long_limit_s(self) -> float:
        return max(self._slow_s, self._step_limit_s)

    def _wait(self) -> None:
        others_s = self._long_limit_s() if self._reads else self._limit_s
        self._arm(others_s + PATIENCE_S)

    def _begin(self, step: int | None, doing: str, limit_s: float) -> None:
        self.step, self._doing, self._limit_s = step, doing, limit_s
        self._patient = False
        self._note(step, doing)
        if not (1 - TOO_EARLY) * limit_s < self._until_s - time.monotonic() <= limit_s:
            self._arm(limit_s)

    def _note(self, step: int | None, doing: str) -> None:
        if self._line is not None and not self._is_overdue():
            self._line[:] = _line("start" if step is None else f"step {step}", doing)

    def _arm(self, limit_s: float) -> None:
        if self._is_overdue():
            return
        self._until_s = math.inf
        if self._by_signal:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            self._until_s = time.monotonic() + limit_s
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started: better no limit than no training
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._errors or sys.stderr)
            self._until_s = time.monotonic() + limit_s

    def _is_overdue(self) -> bool:
        """Whether the timer is about to fire, because this process was stopped for too long."""
        return time.monotonic() > self._until_s


def _line(place: str, doing: str) -> bytes:
    return f"{place} {doing}".encode().ljust(_LINE_LENGTH - 1) + b"\n"


def _shared_line(path: Path) -> mmap.mmap | None:
    """A mapping of the new file, whose disk space is already taken; None if there is no space or no mapping."""
    part = path.with_name(f"{path.name}.part")
    try:
        with new_file(part) as file:
            file.write(_line("start", "working"))
            file.flush()
            line = mmap.mmap(file.fileno(), _LINE_LENGTH)
        part.replace(path)  # the mapping of an earlier attempt keeps its own file
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return None
    return line
