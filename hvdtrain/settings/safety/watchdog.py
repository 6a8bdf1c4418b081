"""Ends a rank that hangs, and with it the job, and writes its stacks; records on disk what each rank is doing.

The record is a line in `<run>/ranks/rank-<r>.at`: 64 bytes of ASCII, padded with spaces before the line end. It is
`start` or `step 17`, a space, and one of:

    working     in its own code: forward, backward, optimizer
    reading     waiting for samples from files, in a step or in an evaluation
    waiting     inside a collective, for the other ranks
    evaluating  in the evaluation after that step
    saving      in the checkpoint after that step
    left        it ended by itself

The line is written through a shared mapping, so that it survives any end of the process. To read it, split the text at
white space; a missing file carries no information. In a hang every rank except the culprit is waiting.

Disks can stall for minutes and recover; computation cannot. Reading therefore has the long limit of a first step, and
so do the ranks that wait for a reading rank. If samples come from files, a stopped rank is detected only after this
limit. A rank that hangs in its own work is still detected after the limit of a step.

The timer is faulthandler's: a thread in C that fires even while the GIL is held. It writes `Timeout (0:01:00)!` and the
stacks of all threads to `<run>/ranks/rank-<r>.err` and ends the process with status 1. The timer of a stopped rank
(SIGSTOP) does not run; the others end the job. If the rank is continued after its limit (mpirun does this before it
ends a rank), its line is not changed, and its timer fires within moments.
"""

import contextlib
import faulthandler
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from hvdtrain.settings.safety.files import shared_file

FIRST_STEPS = 3  # slow because they choose kernels and start loader workers
MEDIAN_FACTOR = 10
MIN_LIMIT_S = 60.0
# Limit for reading, the first steps, the first batch of an evaluation, a checkpoint, and all setup before the first
# step.
SLOW_S = 600.0
SLOW_FACTOR = 10  # SLOW_S as a multiple of a given timeout
# The others began to wait no earlier than the culprit began its work, so with this margin its timer fires first.
WAIT_MARGIN_S = 0.5
# Setting the timer starts a thread, so a timer that fires early by at most this share of its limit is kept.
EARLY_SHARE = 0.01

_Batch = TypeVar("_Batch")
_LINE_LENGTH = 64  # one cache line: a reader on this host never sees half of it


class Watchdog:
    """Records what its rank is doing; each call sets a new time limit, possibly shorter by up to EARLY_SHARE.

    This one is turned off: it only remembers the step.
    """

    step: int | None = None  # the last step that began; None before the first

    def begin_step(self, step: int) -> None:
        """Begin a step, numbered as in the log; a second call in the same step restarts its limit."""
        self.step = step

    def time_reads(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        """Yield batches read from files: each read has the long limit, then the limit of the work restarts."""
        return batches

    def begin_evaluation(self, step: int) -> None:
        """Begin the next batch of the evaluation after this step; from the second batch on with the limit of a step."""
        self.step = step

    def begin_checkpoint(self, step: int) -> None:
        """Begin the checkpoint after this step; called on all ranks, since they wait for each other."""
        self.step = step

    def collective(self) -> AbstractContextManager[None]:
        """Return a context in which the rank waits for the others; may be nested.

        The limit is the others', that of the interrupted work or of reading if the run reads files, plus WAIT_MARGIN_S.
        """
        return nullcontext()

    def is_overdue(self) -> bool:
        """Return whether the timer is about to fire because this process was stopped for too long."""
        return False

    def close(self) -> None:
        """Turn the timer off and close the files, because the rank has done its work."""


OFF = Watchdog()


def slow_limit_s(hang_timeout_s: float | None) -> float:
    """Return the limit of slow activities for this timeout of a step."""
    return SLOW_S if hang_timeout_s is None else SLOW_FACTOR * hang_timeout_s


class RankWatchdog(Watchdog):
    """Write the activity line and arm the timer; on a full disk the line is omitted, and stacks go to stderr."""

    def __init__(
        self,
        run_folder: Path,
        rank: int,
        *,
        hang_timeout_s: float | None,
        min_limit_s: float = MIN_LIMIT_S,
    ) -> None:
        """Watch this rank, one per process, until the timer ends it.

        Without a timeout the limit of a step is MEDIAN_FACTOR times the median of the last 50 steps, at least
        `min_limit_s`.
        """
        folder = run_folder / "ranks"
        self._line = shared_file(folder / f"rank-{rank}.at", _line("start", "working"))
        self._errors = None
        with contextlib.suppress(OSError):
            self._errors = (folder / f"rank-{rank}.err").open("a")  # appends to existing content
        self._timeout_s, self._min_limit_s = hang_timeout_s, min_limit_s
        self._durations_s: deque[float] = deque(maxlen=50)
        self._step_limit_s = self._slow_s = slow_limit_s(hang_timeout_s)
        self._reads_files = False  # whether this run reads files
        self._fires_at_s = math.inf  # when the timer fires, on time.monotonic()
        self._last_start: tuple[int, float] | None = None  # number and start of the last step
        self._is_silent = False  # already in a collective, or left
        self._has_wait_limit = False  # the timer already has the limit of a waiting rank
        self._start_activity(None, "working", self._slow_s)

    def begin_step(self, step: int) -> None:
        if self._last_start is None or step != self._last_start[0]:
            now = time.monotonic()
            if self._last_start is not None:
                self._durations_s.append(now - self._last_start[1])
            self._last_start = (step, now)
            self._step_limit_s = self._next_step_limit_s()
        self._start_activity(step, "working", self._step_limit_s)

    def time_reads(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        self._reads_files = True  # even if another rank reads for this one, which waits for it
        return self._timed(batches)

    def _timed(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        while True:
            self._write_activity(self.step, "reading")
            self._arm(self._long_limit_s())
            batch = next(batches, None)  # after an error the line is kept: the rank was reading when it failed
            self._start_activity(self.step, self._activity, self._limit_s)
            if batch is None:
                return
            yield batch

    def begin_evaluation(self, step: int) -> None:
        is_evaluating = self._activity == "evaluating"
        self._start_activity(step, "evaluating", self._step_limit_s if is_evaluating else self._long_limit_s())

    def begin_checkpoint(self, step: int) -> None:
        self._start_activity(step, "saving", self._long_limit_s())

    @contextmanager
    def collective(self) -> Iterator[None]:
        if self._is_silent:
            yield
            return
        self._is_silent = True
        self._write_activity(self.step, "waiting")
        if not self._has_wait_limit:  # once, because batch norm over all ranks runs a hundred collectives per step
            self._has_wait_limit = True
            wait_s = self._long_limit_s() if self._reads_files else self._limit_s
            self._arm(wait_s + WAIT_MARGIN_S)
        try:
            yield
        finally:
            self._is_silent = False
        self._write_activity(self.step, self._activity)  # not after an error: the rank was waiting when it failed

    def close(self) -> None:
        self._is_silent = True
        faulthandler.cancel_dump_traceback_later()
        self._fires_at_s = math.inf
        self._write_activity(self.step, "left")
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
        return max(self._min_limit_s, MEDIAN_FACTOR * statistics.median(self._durations_s))

    def _long_limit_s(self) -> float:
        return max(self._slow_s, self._step_limit_s)

    def _start_activity(self, step: int | None, activity: str, limit_s: float) -> None:
        self.step, self._activity, self._limit_s = step, activity, limit_s
        self._has_wait_limit = False
        self._write_activity(step, activity)
        if not (1 - EARLY_SHARE) * limit_s < self._fires_at_s - time.monotonic() <= limit_s:
            self._arm(limit_s)

    def _write_activity(self, step: int | None, activity: str) -> None:
        if self._line is not None and not self.is_overdue():
            self._line[:] = _line("start" if step is None else f"step {step}", activity)

    def _arm(self, limit_s: float) -> None:
        if self.is_overdue():
            return
        self._fires_at_s = math.inf
        with contextlib.suppress(RuntimeError):  # if no thread can be started, train without a limit
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._errors or sys.stderr)
            self._fires_at_s = time.monotonic() + limit_s

    def is_overdue(self) -> bool:
        return time.monotonic() > self._fires_at_s


def _line(place: str, activity: str) -> bytes:
    return f"{place} {activity}".encode().ljust(_LINE_LENGTH - 1) + b"\n"
