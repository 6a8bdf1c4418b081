"""Builds the optimizers named in recipe/settings.py, and their parameter groups."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, weight_decay: float, *, decay_all: bool) -> Groups:
    """Group trainable parameters: decay for matrices and kernels, none for norms and biases unless `decay_all`."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if decay_all:
        return [{"params": trainable, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


class Layerwise(torch.optim.Optimizer):
    """Updates the parameters of a group together; those without a gradient are left as they are."""

    # Returns the norms of whole parameters from those of the pieces of them that this rank holds.
    whole_norms: Callable[[list[Tensor], Tensor], Tensor] = staticmethod(lambda _, norms: norms)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._update(group, parameters, [parameter.grad for parameter in parameters])

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _norms(self, parameters: list[Tensor], tensors: list[Any]) -> Tensor:
        """Return the 2-norm of each tensor, which belongs to the parameter at its place."""
        return self.whole_norms(parameters, torch.stack(torch._foreach_norm(tensors)))

    def _of_each(
        self, parameters: Iterable[Tensor], name: str, *, make: Callable[[Tensor], Tensor] = torch.zeros_like
    ) -> list[Tensor]:
        """Return the state of this name of each parameter, which `make` has made in the first step."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = make(parameter)
        return [self.state[parameter][name] for parameter in parameters]


class Lars(Layerwise):
    """SGD with momentum, with a rate that depends on each layer's norms (You, Gitman and Ginsburg 2017, algorithm 1).

    The local rate is trust x |w| / (|g| + decay x |w|); groups without weight decay (norms and biases) use the plain
    rate, as in the paper.
    """

    def __init__(
        self, params: Any, lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if decay := group["weight_decay"]:
            sizes, slopes = self._norms(parameters, parameters), self._norms(parameters, gradients)
            ratios = group["trust"] * sizes / (slopes + decay * sizes)
            ratios = torch.where((sizes > 0) & (slopes > 0), ratios, 1.0)
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
            torch._foreach_mul_(gradients, list(ratios.unbind()))
        velocities = self._of_each(parameters, "velocity")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocities)


class Lamb(Layerwise):
    """Adam with an update scaled to each matrix's norm (You et al. 2020, algorithm 2, with bias correction).

    Norms and biases use the plain rate, as in the authors' code: a bias starts at 0, and would otherwise stay there.
    """

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

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        first_decay, second_decay = group["betas"]
        firsts, seconds = self._of_each(parameters, "first"), self._of_each(parameters, "second")
        torch._foreach_lerp_(firsts, gradients, 1 - first_decay)
        torch._foreach_mul_(seconds, second_decay)
        torch._foreach_addcmul_(seconds, gradients, gradients, value=1 - second_decay)
        counts = self._of_each(parameters, "step", make=lambda _: torch.zeros(()))  # on the host
        torch._foreach_add_(counts, 1)
        steps = torch.stack(counts).tolist()
        spreads = torch._foreach_div(seconds, [1 - second_decay**step for step in steps])
        torch._foreach_sqrt_(spreads)
        torch._foreach_add_(spreads, group["eps"])
        updates = list(torch._foreach_div(firsts, [1 - first_decay**step for step in steps]))
        torch._foreach_div_(updates, spreads)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if matrices := [parameter for parameter in parameters if parameter.ndim > 1]:
            scaled = [update for update in updates if update.ndim > 1]
            sizes, lengths = self._norms(matrices, matrices), self._norms(matrices, scaled)
            ratios = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
            torch._foreach_mul_(scaled, list(ratios.unbind()))
        torch._foreach_sub_(parameters, updates, alpha=group["lr"])


def with_momentum(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Set the momentum of a fused SGD to zeros: torch's would not initialise it in a skipped first step."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    return optimizer


# From parameter groups and the learning rate; fused if torch supports it (it does not for RMSProp). The momentum and
# epsilon of RMSProp are those of Tan and Le 2019.
BUILD: dict[str, Callable[[Groups, float], torch.optim.Optimizer]] = {
    "sgd": lambda groups, lr: with_momentum(torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=True)),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, alpha=0.9, eps=1e-3, momentum=0.9, foreach=True),
    "adam": lambda groups, lr: torch.optim.Adam(groups, lr=lr, fused=True),
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True),
    "lars": lambda groups, lr: Lars(groups, lr=lr),
    "lamb": lambda groups, lr: Lamb(groups, lr=lr),
}
