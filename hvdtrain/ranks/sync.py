"""Interface for summing gradients over ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.ranks.wire import Wire

State = dict[str, Any]  # of an optimizer for one parameter: tensors of its shape, and numbers


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient; zeros if this rank has none, because all ranks must send the same number of elements."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class GradientSync:
    """Sums gradients over ranks, overlapping with backward; this base class is for a single rank."""

    overlap = True  # if set to False before `expect`, sums begin in `finish`: a profile measures phases in isolation
    shards = 1  # ranks over which the optimizer's state is divided
    _wire: Wire | None = None  # its scale is the only state of sums that have one

    def carry(self, parameter: nn.Parameter) -> None:
        """Sum the gradient of one more parameter, which gets one in each backward pass, with the model's.

        Must be called before the first step.
        """
        assert type(self) is GradientSync, f"{type(self).__name__} sums the model's gradients only"

    def expect(self, backward_passes: int) -> None:
        """Announce the number of backward passes before `finish`; communication starts in the last one."""

    def finish(self) -> None:
        """Wait until every `.grad` holds the sum over ranks; with several ranks, zeros if no rank has a gradient."""

    def decided(self, skip: Tensor) -> None:
        """Called after `finish` with the decision of all ranks: the scalar is 1 if they skip the step, else 0."""

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients from that of the gradients in this rank's optimizer."""
        return norm

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer take its step; all ranks that step together do."""
        optimizer.step()

    def whole(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer with its state of whole parameters, for a checkpoint; a collective of the data group."""
        return optimizer

    def split(self, held: Mapping[nn.Parameter, State]) -> Mapping[nn.Parameter, State]:
        """Return what this rank's optimizer keeps of the state of whole parameters, by its own parameters."""
        return held

    def end_step(self, *, overflowed: bool) -> None:
        """End a step; `overflowed` is whether the sum was not finite after finite forward passes on all ranks."""
        if self._wire is not None:
            self._wire.end_step(overflowed=overflowed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank keeps from step to step, for a checkpoint."""
        return {} if self._wire is None else self._wire.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        if self._wire is not None:
            self._wire.load_state_dict(state)
