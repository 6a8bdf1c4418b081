"""Optimizers, their parameter groups, and the moving average of the weights."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

# Learning rates for a global batch of 256 when --lr is not given. sgd: He et al. 2016; rmsprop, with its momentum and
# epsilon: Tan and Le 2019 (0.256 at 4096); adam and adamw: torch's own default; lars: You, Gitman and Ginsburg 2017 (32
# at 32,768, rounded up); lamb: You et al. 2020 (0.005 at 512 for ResNet-50, by its square-root rule).
BASE_LR = {"sgd": 0.1, "rmsprop": 0.016, "adam": 1e-3, "adamw": 1e-3, "lars": 0.25, "lamb": 3.5e-3}


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
    if name == "lars":
        return Lars(groups, lr=lr)
    if name == "lamb":
        return Lamb(groups, lr=lr)
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


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose rate follows each layer's norms (You, Gitman and Ginsburg 2017, algorithm 1).

    The local rate is trust x |w| / (|g| + decay x |w|); groups without weight decay (norms and biases) take the plain
    rate, as the authors do.
    """

    def __init__(
        self, params: Any, lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            for parameter in parameters:
                decay, gradient = group["weight_decay"], parameter.grad
                if decay:
                    size, slope = parameter.norm(), gradient.norm()
                    ratio = group["trust"] * size / (slope + decay * size)
                    ratio = torch.where((size > 0) & (slope > 0), ratio, 1.0)
                    gradient = (gradient + decay * parameter) * ratio
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
                parameter.sub_(state["velocity"])


class Lamb(torch.optim.Optimizer):
    """Adam whose update is scaled to each layer's norm (You et al. 2020, algorithm 2, with bias correction)."""

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            first_decay, second_decay = group["betas"]
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["first"] = torch.zeros_like(parameter)
                    state["second"] = torch.zeros_like(parameter)
                state["step"] += 1
                first, second = state["first"], state["second"]
                first.lerp_(parameter.grad, 1 - first_decay)
                second.mul_(second_decay).addcmul_(parameter.grad, parameter.grad, value=1 - second_decay)
                corrected = first / (1 - first_decay ** state["step"])
                spread = (second / (1 - second_decay ** state["step"])).sqrt_()
                update = corrected / (spread + group["eps"]) + group["weight_decay"] * parameter
                size, length = parameter.norm(), update.norm()
                ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
                parameter.sub_(group["lr"] * ratio * update)
