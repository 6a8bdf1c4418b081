"""The phases of a step: one call per phase, free if profiling is off.

The phases partition a step: `enter` ends one phase and begins the next, so their times add up to the whole step. Hidden
work counts towards the phase that hides it: gradients sent during backward count as backward, and `sync` is only the
exposed wait after it.
"""

import sys
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Phase = Literal[
    "read",  # waiting for the next batch; if the split is on the device, indexing it
    "augment",
    "to_device",
    "forward",
    "loss",
    "backward",
    "bubble",  # waiting for other ranks of the replica: the pipeline fills, drains or has a slow rank
    "sync",  # waiting for the summed gradients after backward
    "optimizer",  # includes the finite check, clipping and the moving average
    "record",  # logging and checkpoints
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
INPUT: tuple[Phase, ...] = ("read", "augment", "to_device")
COMPUTE: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class StepMeans:
    """Mean times of one rank's steps after the warm-up."""

    steps: int
    step_s: float  # by the host's clock
    phases_s: dict[Phase, float]
    alone_s: dict[Phase, float] | None = None  # each phase in isolation, if measured: passes.TwoPasses
    queued_s: float = 0.0  # of a step, by the host's clock: ready to run, and every core had another thread
    error_s: float | None = None  # standard error of the step time minus the isolated COMPUTE time; None if unknown


class Phases(Protocol):
    """The clock of one rank's steps. Each method's default measures nothing."""

    @property
    def isolated(self) -> bool:
        """Whether each phase of the current or next step runs in isolation.

        In isolation nothing is prefetched, gradients are sent only after backward, and the ranks synchronize before
        each phase.
        """
        return False

    @property
    def uniform_steps(self) -> int:
        """Return for how many steps, starting with this one, the measuring mode does not change."""
        return sys.maxsize

    def enter(self, phase: Phase) -> None:
        """End the current phase, if a step is running, and begin this one; all ranks enter phases in the same order."""
        return

    def end_step(self) -> None:
        """End the step; the time until the next `enter` belongs to no step."""
        return

    def means(self) -> StepMeans | None:
        """Return the means so far; None before the first step after the warm-up."""
        return None

    def close(self) -> None:
        """Finish measuring at the end of the run."""
        return


class Off(Phases):
    """The clock if profiling is off."""


class _ReadsHere(Off):
    """A clock that makes this process read batches itself, one at a time."""

    isolated = True


OFF: Phases = Off()
READS_HERE: Phases = _ReadsHere()
