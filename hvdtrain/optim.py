"""Optimizers, their parameter groups, and the moving average of the weights."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

# Learning rates for a global batch of 256 when --lr is not given. sgd: He et al. 2016; rmsprop, with its momentum and
# epsilon: Tan and Le 2019 (0.256 at 4096); adam and adamw: torch's own default.
BASE_LR = {"sgd": 0.1, "rmsprop": 0.016, "adam": 1e-3, "adamw": 1e-3}


def parameter_groups(model: nn.Module, weight_decay: float, *, decay_all: bool) -> list[dict[str, Any]]:
    """Trainable parameters, with decay for matrices and kernels only: none for norms and biases unless `decay_all`."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if decay_all:
        return [{"params": trainable, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def build(name: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of that name, fused where torch has it (RMSProp has not)."""
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=True)
    if name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1e-3, momentum=0.9, foreach=True)
    if name == "adam":
        return torch.optim.Adam(groups, lr=lr, fused=True)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True)
    raise AssertionError(name)


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
