"""Where a step's time goes: one call per phase, nothing at all when off.

The phases partition a step: `enter` ends one and begins the next, so that they sum to the whole step. Work that is
hidden behind a phase counts as that phase: while backward runs, gradients travel in backward's time, and `sync` is the
wait that is left.
"""

import sys
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Phase = Literal[
    "read",  # the wait for the next batch; if the split is on the device, its indexing
    "augment",
    "to_device",
    "forward",
    "loss",
    "backward",
    "bubble",  # the wait for other ranks of the replica: as a pipeline fills, drains, or has a slow rank
    "sync",  # the wait for the summed gradients after backward has ended
    "optimizer",  # with the finite check, clipping and the moving average
    "record",  # logging and checkpoints
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
INPUT: tuple[Phase, ...] = ("read", "augment", "to_device")
COMPUTE: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")


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
    def isolated(self) -> bool:
        """Whether each phase of the next step, or of the running one, is to have the machine for itself.

        Then nothing is read ahead and gradients travel after backward; the ranks wait for each other before each phase.
        """

    @property
    def uniform_steps(self) -> int:
        """How many steps, from that step on, are taken in the same way."""

    def enter(self, phase: Phase) -> None:
        """End the current phase, if a step is running, and begin this one; by all ranks in the same order."""

    def end_step(self) -> None:
        """End the step; the time until the next `enter` belongs to no step."""

    def means(self) -> StepMeans | None:
        """The means so far; None before the first step after the warm-up."""

    def close(self) -> None:
        """The run is over."""


class Unmeasured:
    """Steps as they are without a clock."""

    isolated = False
    uniform_steps = sys.maxsize


class Off(Unmeasured):
    """No clock."""

    def enter(self, phase: Phase) -> None:
        pass

    def end_step(self) -> None:
        pass

    def means(self) -> StepMeans | None:
        return None

    def close(self) -> None:
        pass


OFF: Phases = Off()
