"""Moving averages of the weights, which are evaluated instead of the weights, and of running statistics."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.model import batch_norm
from hvdtrain.core.model import state as model_state
from hvdtrain.recipe.settings import OptimizerSettings

# Maximum memory of a moving average, as a share of the run. A dozen steps on the digits end at chance with batch norm's
# default memory of ten steps, and at 92 % with one: docs/explanation/accuracy.md.
MOST_OF_RUN = 0.1

_AVERAGED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # parameters of other types are the model's


class MovingAverage(nn.Module):
    """The exponential moving average of a model's parameters and running statistics, with a memory in steps.

    The memory grows with the steps taken, as in tf.train.ExponentialMovingAverage, so that a short run does not
    remember its random initial values.
    """

    n_averaged: Tensor

    def __init__(self, model: nn.Module, *, horizon_steps: float) -> None:
        super().__init__()
        self.module = model_state.copy_of(
            model, remedy="Pass --ema-epochs 0, which needs no copy, or give the module a method __deepcopy__."
        )
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device))
        self._least = 1 / max(1.0, horizon_steps)
        self._followed = (model,)  # in a tuple, so that it is not a part of this module
        self._statistics = batch_norm.running_statistics(model)
        self._average_statistics, self._current_statistics = (
            model_state.Places(one, self._statistics) for one in (self.module, model)
        )
        pairs = list(zip(self.module.parameters(), model.parameters(), strict=True))
        self._averages = [average for average, current in pairs if current.dtype in _AVERAGED]
        self._currents = [current for _, current in pairs if current.dtype in _AVERAGED]
        self._copied = [(average, current) for average, current in pairs if current.dtype not in _AVERAGED]
        self._whole: dict[Tensor, Tensor] = {}  # divided parameters by the model's
        self._layouts: list[tuple[torch.Size, tuple[int, ...]]] = []  # their shapes and strides
        self._is_whole = True

    def divide(self, shards: Any) -> None:
        """Keep only this rank's pieces, those of a sync.sharded.ShardedSync, except between `gather` and a step."""
        self._shards, pairs = shards, list(zip(self._currents, self._averages, strict=True))
        self._whole = {current: average for current, average in pairs if current.requires_grad}
        self._layouts = [(average.shape, average.stride()) for average in self._whole.values()]
        self._pieces = {current: piece.clone() for current, piece in shards.pieces_of(self._whole).items()}
        frozen = [pair for pair in pairs if not pair[0].requires_grad]
        self._averages = [*self._pieces.values(), *(average for _, average in frozen)]
        currents = shards.pieces_of({current: current for current in self._whole}).values()
        self._currents = [*currents, *(current for current, _ in frozen)]
        self._release()

    def _release(self) -> None:
        """Free the divided parameters, and keep this rank's pieces of them."""
        if self._whole and self._is_whole:
            for current, piece in self._shards.pieces_of(self._whole).items():
                self._pieces[current].copy_(piece)
            self._resize(is_whole=False)

    def _resize(self, *, is_whole: bool) -> None:
        """Give the divided parameters new memory, or none: who holds the old one, as a state dict does, keeps it."""
        if self._is_whole != is_whole:
            self._is_whole = is_whole
            for average, layout in zip(self._whole.values(), self._layouts, strict=True):
                average.data = average.new_empty_strided(*layout) if is_whole else average.new_empty(0)

    def gather(self) -> None:
        """Make the average's parameters whole until the next step; a collective if the ranks have divided them."""
        if not self._is_whole:
            self._resize(is_whole=True)
            self._shards.gather_(self._pieces, self._whole)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load whole parameters, of which this rank may keep pieces."""
        self._resize(is_whole=True)
        loaded = super().load_state_dict(*arguments, **options)
        self._release()
        return loaded

    @torch.no_grad()
    def follow(self, not_finite: Tensor, *, steps: int = 1) -> None:
        """Move towards the model by `steps` steps; do nothing if the scalar `not_finite` is 1.

        The host reads nothing from the device.
        """
        self._release()
        weight = torch.where(self.n_averaged == 0, 1.0, (9 / (10 + self.n_averaged)).clamp(min=self._least))
        if steps > 1:
            weight = 1 - (1 - weight) ** steps
        weight *= 1 - not_finite
        self.n_averaged.add_(not_finite == 0, alpha=steps)
        averages = [*self._averages, *self._average_statistics()]
        currents = [*self._currents, *self._current_statistics()]
        if weight.is_cuda:  # otherwise there would be a kernel for each tensor
            difference = torch._foreach_sub(currents, averages)
            torch._foreach_mul_(difference, weight)
            torch._foreach_add_(averages, difference)
        else:
            torch._foreach_lerp_(averages, currents, [weight] * len(averages))

    @torch.no_grad()
    def model(self) -> nn.Module:
        """Return the averaged model; state that is not averaged, such as batch norm's counters, is the model's."""
        self.gather()
        [model] = self._followed
        for average, current in self._copied:
            average.copy_(current)
        state, known = model_state.state_of(model), dict(self.module.named_buffers())
        values = dict.fromkeys(model_state.state_of(self.module).buffers) | {
            name: buffer for name, buffer in model.named_buffers() if name in state.buffers or name in known
        }
        model_state.set_buffers(
            self.module, {name: value for name, value in values.items() if name not in self._statistics}
        )
        model_state.set_extra_state(self.module, copy.deepcopy(state.extra))
        return self.module


def average_of_run(
    model: nn.Module, config: OptimizerSettings, *, steps_per_epoch: int, steps: float
) -> MovingAverage | None:
    """Return the moving average of the model, if the settings request it, with a memory suited to a run of `steps`."""
    if not config.ema_epochs:
        return None
    return MovingAverage(model, horizon_steps=min(config.ema_epochs * steps_per_epoch, MOST_OF_RUN * steps))


def limit_statistics(model: nn.Module, *, passes: float) -> None:
    """Give the model's running statistics a memory suited to a run of this number of forward passes of a rank.

    By default it is 1 / momentum passes, which are 10 for most models and 100 for efficientnet_b5 to b7.
    """
    for layer in batch_norm.layers(model):
        if layer.momentum is not None:
            layer.momentum = max(layer.momentum, 1 / max(1.0, MOST_OF_RUN * passes))
