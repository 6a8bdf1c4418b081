"""All that training needs to go on exactly where it was, as tensors, numbers and words.

What ranks have in common is rank 0's; each has random numbers, batch-norm statistics and whatever else is its own.
Where a replica is cut into stages or slices, the ranks of the first one have their parameters among what is their own,
by name.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hvdtrain.ranks.comm import Comm, stream
from hvdtrain.tensor.linear import slices_of


class Stateful(Protocol):
    """What can be saved and brought back: a module, an optimizer, a scaler, anything that counts."""

    def state_dict(self) -> dict[str, Any]:
        """As tensors, numbers and words."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Go on from there."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The parts of a training, each in use."""

    comm: Comm
    device: torch.device
    seed: int
    model: nn.Module
    average: nn.Module | None  # the moving average of the model
    optimizer: torch.optim.Optimizer
    shared: Mapping[str, Stateful]  # other parts that all ranks have alike
    own: Mapping[str, Stateful]  # parts that each rank has for itself
    stages_at: tuple[int, ...] = ()  # the first blocks of the stages but the first

    @property
    def models(self) -> list[nn.Module]:
        """Those whose buffers are each rank's own."""
        return [self.model, *([] if self.average is None else [self.average])]


def shared(state: State) -> dict[str, Any]:
    """What all ranks have alike; the tensors are those in use."""
    alike = {name: part.state_dict() for name, part in state.shared.items()}
    if state.comm.replica.size > 1:
        return alike
    return {
        **_of_model(state),
        "optimizer": state.optimizer.state_dict(),
        "parameters": list(_trained(state)),  # the names of the optimizer's numbers
        **alike,
    }


def _of_model(state: State) -> dict[str, Any]:
    average = None if state.average is None else _parameters(state.average)
    return {"model": _parameters(state.model), "average": average}


def _trained(state: State) -> dict[str, nn.Parameter]:
    """What the optimizer steps, by name, in its order."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return {names[id(one)]: one for group in state.optimizer.param_groups for one in group["params"]}


def _of_part(state: State) -> dict[str, Any]:
    """What this rank has of the whole model, by names; `sliced` are the dimensions in which it has but a slice."""
    held = {name: state.optimizer.state.get(one, {}) for name, one in _trained(state).items()}
    return {**_of_model(state), "held": held, "sliced": slices_of(state.model)}


def by_name(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a whole model's `shared` has, as the `own` of a part."""
    remembered = saved["optimizer"]["state"]
    held = {name: remembered.get(number, {}) for number, name in enumerate(saved["parameters"])}
    return {"part": {"model": saved["model"], "average": saved["average"], "held": held, "sliced": {}}}


def joined(of_parts: Iterable[Mapping[str, Any]], state: State, *, fits: bool) -> dict[str, Any]:
    """What this rank needs of the `own` of parts, as `shared` of a whole model has it.

    One after the other is looked at. Where they were cut as this run is, it `fits`, they are this rank's alone.
    """
    wanted, found, sliced = _of_part(state), dict[str, dict[str, list[Any]]](), dict[str, int]()
    for one in of_parts:
        part = one["part"]
        sliced |= {} if fits else part["sliced"]
        for kind in ("model", "average", "held"):
            for name in wanted[kind] or ():
                if part[kind] is not None and name in part[kind]:
                    found.setdefault(kind, {}).setdefault(name, []).append(part[kind][name])
    own = {} if fits else wanted["sliced"]
    number, count = state.comm.replica.rank, state.comm.replica.size

    def fitting(name: str, values: list[Any]) -> Any:
        if isinstance(values[0], Mapping):  # what the optimizer remembers
            return {key: fitting(name, [value[key] for value in values]) for key in values[0]}
        if not isinstance(values[0], torch.Tensor) or values[0].dim() == 0:
            return values[0]
        whole = torch.cat(values, sliced[name]) if name in sliced else values[0]
        return whole.chunk(count, own[name])[number] if name in own else whole

    together = {kind: {name: fitting(name, values) for name, values in named.items()} for kind, named in found.items()}
    return {"model": {}, "average": None, "held": {}, **together}


def own(state: State) -> dict[str, Any]:
    """What this rank has for itself; the tensors are those in use."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (whatever a library draws from)
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(state.device) if state.device.type == "cuda" else None,
        "buffers": [dict(model.named_buffers()) for model in state.models],
        **({"part": _of_part(state)} if state.comm.replica.size > 1 and state.comm.data.rank == 0 else {}),
        **{name: part.state_dict() for name, part in state.own.items()},
    }


def mean_of(owns: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks of another number go on with: the mean of the floating buffers of `owns`, the others of the first.

    Each stage has buffers of its own. One after the other is looked at, so that no more than two of them need be in
    memory.
    """
    buffers: list[dict[str, Any]] = []
    sums: dict[tuple[int, str], torch.Tensor] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for one in owns:
        for place, values in enumerate(one["buffers"]):
            if place == len(buffers):
                buffers.append({})
            for name, value in values.items():
                counts[place, name] += 1
                if counts[place, name] > 1:
                    if value.is_floating_point():
                        sums[place, name].add_(value)
                    continue
                buffers[place][name] = value
                if value.is_floating_point():
                    sums[place, name] = value.to(torch.float64, copy=True)
    for (place, name), total in sums.items():
        buffers[place][name] = (total / counts[place, name]).to(buffers[place][name].dtype)
    return {"buffers": buffers}


def restore(state: State, saved: Mapping[str, Any], mine: Mapping[str, Any], *, step: int) -> None:
    """Bring back `shared`, and this rank's `own` or the `mean_of` all.

    With that mean random numbers are new ones, drawn from the seed, the step and the rank, and what else was a rank's
    own begins anew.
    """
    restore_shared(state, saved)
    restore_buffers(state, mine["buffers"])
    if mine.keys() == {"buffers"}:
        seeds = np.random.SeedSequence([state.seed, step, stream(state.comm)])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        return
    _restore_random(mine, state.device)
    for name, part in state.own.items():
        part.load_state_dict(mine[name])


def restore_shared(state: State, saved: Mapping[str, Any]) -> None:
    """Bring back `shared` alone."""
    _restore_parameters(state.model, saved["model"])
    if state.average is not None and saved["average"] is not None:
        _restore_parameters(state.average, saved["average"])
    _restore_optimizer(state.optimizer, _numbered(saved["held"], state) if "held" in saved else saved["optimizer"])
    for name, part in state.shared.items():
        if saved[name]:  # else the part did nothing, as a scaler without fp16
            part.load_state_dict(saved[name])


def restore_buffers(state: State, saved: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Bring back a rank's own buffers, as running statistics, of each model by name."""
    for model, values in zip(state.models, saved, strict=True):
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def _parameters(model: nn.Module) -> dict[str, Any]:
    """Its state without the buffers, which are each rank's own."""
    buffers = dict(model.named_buffers())
    return {name: value for name, value in model.state_dict().items() if name not in buffers}


def _restore_parameters(model: nn.Module, saved: Mapping[str, Any]) -> None:
    if missing := _parameters(model).keys() - saved.keys():
        raise KeyError(f"no {sorted(missing)[0]}")
    model.load_state_dict({**model.state_dict(), **saved})


def _numbered(held: Mapping[str, Any], state: State) -> dict[str, Any]:
    """An optimizer's state dict from what it remembers by name."""
    numbers = {number: held[name] for number, name in enumerate(_trained(state)) if held[name]}
    return {**state.optimizer.state_dict(), "state": numbers}


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """What it remembers of each parameter; its options, as weight decay, are the command line's."""
    given = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    fresh = {parameter: dict(held) for parameter, held in optimizer.state.items()}
    optimizer.load_state_dict(saved)
    for parameter, held in fresh.items():  # what was not saved stays as it began
        optimizer.state[parameter] = held | optimizer.state.get(parameter, {})
    for parameter, held in optimizer.state.items():  # torch's fused kernels take it to lie as the parameter does
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                held[name] = torch.empty_like(parameter).copy_(value)
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def _restore_random(mine: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = mine["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, *rest = mine["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(mine["torch"])
    if device.type == "cuda" and mine["cuda"] is not None:
        torch.cuda.set_rng_state(mine["cuda"], device)
