"""The moving average of the weights, which is evaluated in their place."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


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
