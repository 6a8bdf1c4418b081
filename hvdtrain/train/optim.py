"""Optimizers and their parameter groups."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, weight_decay: float, *, decay_all: bool) -> Groups:
    """Trainable parameters, with decay for matrices and kernels only: none for norms and biases unless `decay_all`."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if decay_all:
        return [{"params": trainable, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


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
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
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
            for parameter in (known for known in group["params"] if known.grad is not None):
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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer that can be chosen by name."""

    build: Callable[[Groups, float], torch.optim.Optimizer]  # from parameter groups and the learning rate
    base_lr: float  # for a global batch of 256, when --lr is not given
    scaling: Literal["linear", "sqrt"]  # of the rate with the global batch, see schedule.scaled_lr
    layerwise: bool = False  # divides by the norms of single layers' gradients


# Fused where torch has it (RMSProp has not). Rates: sgd He et al. 2016; rmsprop, with its momentum and epsilon, Tan and
# Le 2019 (0.256 at 4096); adam and adamw torch's own default; lars You, Gitman and Ginsburg 2017 (32 at 32,768, rounded
# up); lamb You et al. 2020 (0.005 at 512 for ResNet-50, by its square-root rule). Scaling: linear for SGD and RMSProp
# (Goyal et al. 2017) and LARS (You, Gitman and Ginsburg 2017), the square root for Adam and AdamW (Malladi et al. 2022)
# and LAMB (You et al. 2020).
OPTIMIZERS: dict[str, Kind] = {
    "sgd": Kind(
        build=lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=True),
        base_lr=0.1,
        scaling="linear",
    ),
    "rmsprop": Kind(
        build=lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1e-3, momentum=0.9, foreach=True),
        base_lr=0.016,
        scaling="linear",
    ),
    "adam": Kind(build=lambda groups, lr: torch.optim.Adam(groups, lr=lr, fused=True), base_lr=1e-3, scaling="sqrt"),
    "adamw": Kind(build=lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True), base_lr=1e-3, scaling="sqrt"),
    "lars": Kind(build=lambda groups, lr: Lars(groups, lr=lr), base_lr=0.25, scaling="linear", layerwise=True),
    "lamb": Kind(build=lambda groups, lr: Lamb(groups, lr=lr), base_lr=3.5e-3, scaling="sqrt", layerwise=True),
}
