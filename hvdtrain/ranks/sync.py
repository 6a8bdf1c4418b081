"""Gradients summed over ranks, by Horovod or by nobody."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hvdtrain.ranks.wire import Wire

WaitContext = Callable[[], AbstractContextManager[None]]


class Update(Protocol):
    """What a step does with summed gradients, each part once."""

    def unscale(self) -> Tensor:
        """Take the loss scale off the gradients and decide: 1 if all ranks skip the step, else 0."""

    def clip(self) -> None:
        """Clip the gradients."""

    def step(self) -> None:
        """Step the optimizer that `wrap` has returned, or skip it."""


class GradientSync:
    """Sums gradients over ranks while backward is still running; this one is for a rank that is alone."""

    overlap = True  # set to False before `expect` the sums begin in `finish`: a profile times each part alone

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that steps: the run's own, or one around it."""
        return optimizer

    def carry(self, parameter: nn.Parameter) -> None:
        """Sum the gradient of one more parameter, which has one in each backward pass, with the model's.

        Called before the first step.
        """
        assert type(self) is GradientSync, f"{type(self).__name__} sums the model's gradients only"

    def expect(self, backward_passes: int) -> None:
        """Say how many backward passes this rank makes before `finish`; communication starts in the last one."""

    def finish(self) -> None:
        """Wait until every `.grad` holds the sum over ranks, of two or more zeros where none has a gradient."""

    def apply(self, update: Update) -> None:
        """Synchronize, unscale, clip and step, in the order that these sums need."""
        self.finish()
        update.unscale()
        update.clip()
        self.step(update)

    def step(self, update: Update) -> None:
        """Step the optimizer that `wrap` has returned."""
        update.step()

    def end_step(self, *, overflowed: bool) -> None:
        """End a step; `overflowed` is whether the sum was not finite though no rank's forward pass had failed."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember from step to step, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class WireSync(GradientSync):
    """Sums that travel by a Wire; its scale is all that they remember."""

    _wire: Wire

    def end_step(self, *, overflowed: bool) -> None:
        self._wire.end_step(overflowed=overflowed)

    def state_dict(self) -> dict[str, Any]:
        return self._wire.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wire.load_state_dict(state)
