"""Where a step's time goes: one call per phase, nothing at all when off.

The phases partition a step: `enter` ends one and begins the next, so that they sum to the whole step. Work that is
hidden behind a phase counts as that phase: while backward runs, gradients travel in backward's time, and `sync` is the
wait that is left.
"""

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

Phase = Literal[
    "read",  # the wait for the next batch; if the split is on the device, its indexing
    "augment",
    "to_device",
    "forward",
    "loss",
    "backward",
    "bubble",  # the wait for what other stages of the replica send: as a pipeline fills, drains, or has a slow stage
    "sync",  # the wait for the summed gradients after backward has ended
    "optimizer",  # with the finite check, clipping and the moving average
    "record",  # logging and checkpoints
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
INPUT: tuple[Phase, ...] = ("read", "augment", "to_device")
COMPUTE: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")

# The first steps of a run choose kernels, start loader workers and negotiate with Horovod.
WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class StepMeans:
    """The mean step of one rank since the warm-up."""

    steps: int
    step_s: float  # by the host's clock
    phases_s: dict[Phase, float]
    alone_s: dict[Phase, float] | None = None  # each phase by itself, where it was measured: passes.TwoPasses
    error_s: float | None = None  # standard error of the step less what COMPUTE takes alone; None where it is unknown


class Phases(Protocol):
    """The clock of one rank's steps."""

    @property
    def alone(self) -> bool:
        """Whether each phase of the next step, or of the one that runs, is to have the machine for itself.

        Then nothing is read ahead and gradients travel after backward; the ranks wait for each other before each phase.
        """

    @property
    def steps_alike(self) -> int:
        """How many steps, from that one on, are taken in the same way."""

    def enter(self, phase: Phase) -> None:
        """End the current phase, if a step is running, and begin this one; by all ranks in the same order."""

    def step_done(self) -> None:
        """End the step; the time until the next `enter` belongs to no step."""

    def means(self) -> StepMeans | None:
        """The means so far; None before the first step after the warm-up."""

    def close(self) -> None:
        """The run is over."""


class _Plain:
    """Steps as they are without a clock."""

    alone = False
    steps_alike = sys.maxsize


class _Off(_Plain):
    def enter(self, phase: Phase) -> None:
        pass

    def step_done(self) -> None:
        pass

    def means(self) -> StepMeans | None:
        return None

    def close(self) -> None:
        pass


OFF: Phases = _Off()


class HostClock(_Plain):
    """The phases by the host's clock: exact on CPUs, and on GPUs if `synchronise` waits for the device.

    `meet` waits for the other ranks before each phase; that is in no phase.
    """

    def __init__(
        self,
        synchronise: Callable[[], object] | None = None,
        meet: Callable[[], object] | None = None,
        *,
        unmeasured_steps: int = WARMUP_STEPS,
    ) -> None:
        self._synchronise = synchronise
        self._meet = meet
        self._total_s = dict.fromkeys(PHASES, 0.0)
        self._step_s = dict.fromkeys(PHASES, 0.0)
        self._phase: Phase | None = None
        self._since = 0.0
        self._steps = -unmeasured_steps

    def enter(self, phase: Phase) -> None:
        if self._synchronise is not None:
            self._synchronise()
        now = time.perf_counter()
        if self._phase is not None:
            self._step_s[self._phase] += now - self._since
        if self._meet is not None:
            self._meet()
            now = time.perf_counter()
        self._phase, self._since = phase, now

    def step_done(self) -> None:
        self.enter("other")
        self._phase = None
        self._steps += 1
        for phase, seconds in self._step_s.items():
            if self._steps > 0:
                self._total_s[phase] += seconds
            self._step_s[phase] = 0.0

    def means(self) -> StepMeans | None:
        if self._steps <= 0:
            return None
        means_s = {phase: seconds / self._steps for phase, seconds in self._total_s.items()}
        return StepMeans(steps=self._steps, step_s=sum(means_s.values()), phases_s=means_s)

    def close(self) -> None:
        pass


class Event(Protocol):
    """What DeviceClock needs of a torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds."""


class DeviceClock(_Plain):
    """The phases as the current CUDA stream sees them, from events that are read once the device has passed them.

    The stream stands still while it has nothing to do. So a phase in which the host keeps the device waiting (the next
    batch, gradients on their way) is as long as that wait, and a phase that the device does not notice has no length.
    Nothing is synchronised. The whole step is timed by the host's clock, so that the phases can be compared with it.
    """

    def __init__(self, new_event: Callable[[], Event], *, unmeasured_steps: int = WARMUP_STEPS) -> None:
        self._new_event = new_event
        self._free: list[Event] = []
        self._marks: list[tuple[Phase, Event]] = []
        self._pending: deque[list[tuple[Phase, Event]]] = deque()
        self._total_ms = dict.fromkeys(PHASES, 0.0)
        self._host_s = 0.0
        self._started = 0.0
        self._begun = -unmeasured_steps
        self._steps = 0

    def enter(self, phase: Phase) -> None:
        if not self._marks:
            self._started = time.perf_counter()
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._marks.append((phase, event))

    def step_done(self) -> None:
        self.enter("other")
        self._begun += 1
        if self._begun > 0:
            self._host_s += time.perf_counter() - self._started
            self._pending.append(self._marks)
        else:
            self._free += [event for _, event in self._marks]
        self._marks = []
        while self._pending and self._pending[0][-1][1].query():
            self._read(self._pending.popleft())

    def _read(self, marks: list[tuple[Phase, Event]]) -> None:
        for (phase, start), (_, end) in itertools.pairwise(marks):
            self._total_ms[phase] += start.elapsed_time(end)
        self._free += [event for _, event in marks]
        self._steps += 1

    def means(self) -> StepMeans | None:
        while self._pending:
            self._pending[0][-1][1].synchronize()
            self._read(self._pending.popleft())
        if not self._steps:
            return None
        means_s = {phase: total / 1000 / self._steps for phase, total in self._total_ms.items()}
        return StepMeans(steps=self._steps, step_s=self._host_s / self._steps, phases_s=means_s)

    def close(self) -> None:
        pass
