"""The default schedule, by which replicas are equal after every step."""

from typing import Protocol

from torch import Tensor, nn

from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.settings.safety.exits import EndOfRun


class Follower(Protocol):
    """A moving average of the model."""

    def follow(self, not_finite: Tensor, *, steps: int = 1) -> None:
        """Move towards the model by `steps` steps; do nothing if the scalar `not_finite` is 1."""

    def model(self) -> nn.Module:
        """Return the averaged model."""


class EveryStep:
    """The default schedule: all ranks sum their gradients at every step, and replicas are always equal."""

    is_apart = False  # whether groups of ranks step on their own
    waited_s = 0.0  # for other groups at the last synchronization

    def step_group(self, comm: Comm) -> Members:
        """Return the ranks that take or skip the next step together."""
        return comm

    def weight(self, global_count: float, group_count: float) -> float:
        """Return the weight of the samples of the ranks that step together, which are all ranks."""
        return global_count

    def follow(self, average: Follower, skip: Tensor) -> None:
        """Let the moving average follow the model after a step, unless only one group has taken the step."""
        average.follow(skip)

    def begin(self, epoch: int, step: int) -> None:
        """Begin or resume an epoch after this step."""

    def syncs_after(self, step: int, *, last: int) -> bool:
        """Return whether replicas are equal after this step; `last` is the last step of the epoch."""
        return True

    def sync(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        """Make replicas equal after this step; return why the run ends, if any rank ends it."""
        return end
