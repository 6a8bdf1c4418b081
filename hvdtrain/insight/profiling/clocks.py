"""Clocks for the phases of a step: by host time, or by a GPU's events."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from hvdtrain.core.phases import PHASES, Phase, Phases, StepMeans

# The first steps of a run choose kernels, start loader workers and negotiate with Horovod.
WARMUP_STEPS = 2
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns on a core, ns ready to run but without one, time slices


def read_queued_s() -> float:
    """Return how many seconds this thread has waited for a core since it began; 0 where the kernel does not count."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class HostClock(Phases):
    """Times the phases by the host's clock: exact on CPUs, and on GPUs if `synchronise` waits for the device.

    `barrier` waits for the other ranks before each phase; this wait belongs to no phase.
    """

    def __init__(
        self,
        synchronise: Callable[[], object] | None = None,
        barrier: Callable[[], object] | None = None,
        *,
        unmeasured_steps: int = WARMUP_STEPS,
    ) -> None:
        self._synchronise = synchronise
        self._barrier = barrier
        self._total_s = dict.fromkeys(PHASES, 0.0)
        self._step_s = dict.fromkeys(PHASES, 0.0)
        self._phase: Phase | None = None
        self._phase_start = 0.0
        self._steps = -unmeasured_steps
        self._queued_s = self._queued_at_s = 0.0  # of the measured steps, and before this one

    def enter(self, phase: Phase) -> None:
        if self._synchronise is not None:
            self._synchronise()
        now = time.perf_counter()
        if self._phase is None:
            self._queued_at_s = read_queued_s()
        else:
            self._step_s[self._phase] += now - self._phase_start
        if self._barrier is not None:
            self._barrier()
            now = time.perf_counter()
        self._phase, self._phase_start = phase, now

    def end_step(self) -> None:
        self.enter("other")
        self._phase = None
        self._steps += 1
        for phase, seconds in self._step_s.items():
            if self._steps > 0:
                self._total_s[phase] += seconds
            self._step_s[phase] = 0.0
        if self._steps > 0:
            self._queued_s += read_queued_s() - self._queued_at_s

    def means(self) -> StepMeans | None:
        if self._steps <= 0:
            return None
        means_s = {phase: seconds / self._steps for phase, seconds in self._total_s.items()}
        queued_s = self._queued_s / self._steps
        return StepMeans(steps=self._steps, step_s=sum(means_s.values()), phases_s=means_s, queued_s=queued_s)


class DeviceClock(Phases):
    """Times the phases on the current CUDA stream, by events that are read once the device has passed them.

    The stream is idle while it has no work. A phase in which the host keeps the device waiting (for the next batch, for
    gradients in flight) is therefore as long as that wait, and a phase without effect on the device has no length.
    Nothing is synchronized. The whole step is timed by the host's clock, so that the phases can be compared with it.
    """

    def __init__(self, new_event: Callable[[], torch.cuda.Event], *, unmeasured_steps: int = WARMUP_STEPS) -> None:
        self._new_event = new_event
        self._marks: list[tuple[Phase, torch.cuda.Event]] = []
        self._pending: deque[list[tuple[Phase, torch.cuda.Event]]] = deque()
        self._total_ms = dict.fromkeys(PHASES, 0.0)
        self._host_s = 0.0
        self._step_start = 0.0
        self._started_steps = -unmeasured_steps
        self._steps = 0

    def enter(self, phase: Phase) -> None:
        if not self._marks:
            self._step_start = time.perf_counter()
        event = self._new_event()
        event.record()
        self._marks.append((phase, event))

    def end_step(self) -> None:
        self.enter("other")
        self._started_steps += 1
        if self._started_steps > 0:
            self._host_s += time.perf_counter() - self._step_start
            self._pending.append(self._marks)
        self._marks = []
        while self._pending and self._pending[0][-1][1].query():
            self._read(self._pending.popleft())

    def _read(self, marks: list[tuple[Phase, torch.cuda.Event]]) -> None:
        for (phase, start), (_, end) in itertools.pairwise(marks):
            self._total_ms[phase] += start.elapsed_time(end)
        self._steps += 1

    def means(self) -> StepMeans | None:
        while self._pending:
            self._pending[0][-1][1].synchronize()
            self._read(self._pending.popleft())
        if not self._steps:
            return None
        means_s = {phase: total / 1000 / self._steps for phase, total in self._total_ms.items()}
        return StepMeans(steps=self._steps, step_s=self._host_s / self._steps, phases_s=means_s)
