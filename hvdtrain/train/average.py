"""Moving averages: of the weights, which are evaluated in their place, and of batch norm's statistics."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hvdtrain.train import batch_norm
from hvdtrain.train.options import RunConfig

# What a moving average remembers at most, as a share of the run. A dozen steps on the digits end at chance with batch
# norm's usual ten, and at 92 % with one: docs/accuracy.md.
MOST_OF_RUN = 0.1


def averages_of_run(model: nn.Module, config: RunConfig, *, steps_per_epoch: int) -> AveragedModel | None:
    """The moving average of the model if the settings ask for one, with a memory that is right for so short a run.

    The model's running statistics get one too: theirs is 1 / momentum forward passes, which are 10 for most models and
    100 for efficientnet_b5 to b7.
    """
    most_steps = MOST_OF_RUN * config.epochs * steps_per_epoch
    for layer in batch_norm.layers(model):
        if layer.momentum is not None:
            layer.momentum = max(layer.momentum, 1 / max(1.0, most_steps * config.accumulate_steps))
    if not config.ema_epochs:
        return None
    return moving_average(model, horizon_steps=min(config.ema_epochs * steps_per_epoch, most_steps))


def moving_average(model: nn.Module, *, horizon_steps: float) -> AveragedModel:
    """The exponential moving average of parameters and buffers, with the given memory in steps.

    Call its `update_parameters(model)` after every step. The memory grows with the steps taken, as in
    tf.train.ExponentialMovingAverage, so that a short run does not remember its random start.
    """

    @torch.no_grad()
    def blend(averages: Any, currents: Any, count: Any) -> None:
        if not averages[0].is_floating_point():  # BN's batch counter
            torch._foreach_copy_(averages, currents)
            return
        weight = (9 / (10 + count)).clamp(min=1 / max(1.0, horizon_steps))  # stays on the device
        difference = torch._foreach_sub(currents, averages)
        torch._foreach_mul_(difference, weight)
        torch._foreach_add_(averages, difference)

    return AveragedModel(model, multi_avg_fn=blend, use_buffers=True)
