"""Moving averages of the weights, which are evaluated instead of the weights, and of batch norm's statistics."""

import copy

import torch
from torch import Tensor, nn

from hvdtrain.core import batch_norm
from hvdtrain.recipe.settings import OptimizerSettings

# Maximum memory of a moving average, as a share of the run. A dozen steps on the digits end at chance with batch norm's
# default memory of ten steps, and at 92 % with one: docs/explanation/accuracy.md.
MOST_OF_RUN = 0.1


class MovingAverage(nn.Module):
    """The exponential moving average of a model's parameters and running statistics, with a memory in steps.

    The memory grows with the steps taken, as in tf.train.ExponentialMovingAverage, so that a short run does not
    remember its random initial values.
    """

    n_averaged: Tensor

    def __init__(self, model: nn.Module, *, horizon_steps: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device))
        self.remember(horizon_steps=horizon_steps)
        self._averages, self._currents = _averaged(self.module), _averaged(model)
        averaged = {id(tensor) for tensor in (*self._averages, *self._currents)}
        self._copied_buffers = [
            (averaged_buffer, buffer)
            for averaged_buffer, buffer in zip(self.module.buffers(), model.buffers(), strict=True)
            if id(averaged_buffer) not in averaged
        ]

    def remember(self, *, horizon_steps: float) -> None:
        """Set the memory to this number of steps from now on."""
        self._least = 1 / max(1.0, horizon_steps)

    @torch.no_grad()
    def follow(self, not_finite: Tensor, *, steps: int = 1) -> None:
        """Move towards the model by `steps` steps; do nothing if the scalar `not_finite` is 1.

        The host reads nothing from the device.
        """
        weight = torch.where(self.n_averaged == 0, 1.0, (9 / (10 + self.n_averaged)).clamp(min=self._least))
        if steps > 1:
            weight = 1 - (1 - weight) ** steps
        weight *= 1 - not_finite
        self.n_averaged.add_(not_finite == 0, alpha=steps)
        if weight.is_cuda:  # otherwise there would be a kernel for each tensor
            difference = torch._foreach_sub(self._currents, self._averages)
            torch._foreach_mul_(difference, weight)
            torch._foreach_add_(self._averages, difference)
        else:
            torch._foreach_lerp_(self._averages, self._currents, [weight] * len(self._averages))

    @torch.no_grad()
    def model(self) -> nn.Module:
        """Return the averaged model; state that is not averaged, such as batch norm's counters, is the model's."""
        for averaged_buffer, buffer in self._copied_buffers:
            averaged_buffer.copy_(buffer)
        return self.module


def _averaged(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *batch_norm.running_statistics(model)]


def averages_of_run(model: nn.Module, config: OptimizerSettings, *, steps_per_epoch: int) -> MovingAverage | None:
    """Return the moving average of the model, if the settings request it, with a memory suited to the run's length.

    The model's running statistics also get a suitable memory: by default it is 1 / momentum forward passes, which are
    10 for most models and 100 for efficientnet_b5 to b7.
    """
    most_steps = MOST_OF_RUN * config.epochs * steps_per_epoch
    for layer in batch_norm.layers(model):
        if layer.momentum is not None:
            layer.momentum = max(layer.momentum, 1 / max(1.0, most_steps * config.accumulate_steps))
    if not config.ema_epochs:
        return None
    return MovingAverage(model, horizon_steps=horizon_steps(config, steps_per_epoch))


def horizon_steps(config: OptimizerSettings, steps_per_epoch: int) -> float:
    """Return the memory that the settings request, limited by the length of the run."""
    return min(config.ema_epochs, MOST_OF_RUN * config.epochs) * steps_per_epoch
