"""An optimizer and a schedule that a program brings along."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.recipe.optim import with_momentum
from hvdtrain.settings.safety.exits import BadInput

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Schedule = Callable[[float], float]  # from the progress of the run, 0 to 1, to the share of the peak rate
SHARE = "share_of_lr"  # of the highest rate, in each parameter group
AT_START = "at_start"  # the other values of the group before the first step
NOT_KEPT = ("params", "lr", SHARE, AT_START)


def own_optimizer(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Make a program's optimizer, and note each group's share of the highest rate; BadInput if it cannot train."""
    if not callable(make) or isinstance(make, type):
        raise BadInput(
            f"optimizer: {getattr(make, '__name__', type(make).__name__)} is not a function of the model. Pass a "
            "function that returns an optimizer, for example lambda model: torch.optim.AdamW(model.parameters())."
        )
    optimizer = make(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"optimizer: the function returned a {type(optimizer).__name__}. Return one torch optimizer.")
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise BadInput(f"optimizer {kind}: its step needs a closure, but gradients are summed once. Choose another.")
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if others := [parameter for parameter in held if parameter not in names]:
        raise BadInput(
            f"optimizer {kind}: {len(others)} of its parameters are not trained ones of the model. Leave them out."
        )
    if missing := [name for key, name in names.items() if key not in held]:
        raise BadInput(
            f"optimizer {kind}: parameter {missing[0]} is in none of its groups. Add it, or call requires_grad_(False)."
        )
    peak = peak_lr(optimizer)
    if not 0 < peak < math.inf:
        raise BadInput(f"optimizer {kind}: its highest rate is {peak:g}. Give it a rate greater than 0.")
    for group in optimizer.param_groups:
        group[SHARE] = float(group["lr"]) / peak
        group[AT_START] = copy.deepcopy({name: value for name, value in group.items() if name not in NOT_KEPT})
    return with_momentum(optimizer)


def restore_groups(optimizer: torch.optim.Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Restore what a program's optimizer has changed in its groups since its start, such as a count of steps.

    Its options, which it does not change, are those that the program has given now.
    """
    for group, before in zip(optimizer.param_groups, saved, strict=False):
        if (at_start := before.get(AT_START)) is None:
            continue
        for name, value in before.items():
            if name in NOT_KEPT or (name in at_start and _is_equal(value, at_start[name])):
                continue
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def peak_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the highest rate of an optimizer's groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def require_schedule(schedule: Schedule) -> None:
    """Raise BadInput if the function does not return a share of the peak rate."""
    for progress in (0.0, 0.5, 1.0):
        share = schedule(progress)
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise BadInput(f"schedule({progress:g}): {share!r} is not a share of the peak rate. Return a number >= 0.")
