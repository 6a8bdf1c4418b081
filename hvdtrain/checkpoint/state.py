"""All that training needs to go on exactly where it was, as tensors, numbers and words.

What ranks have in common is rank 0's; each has random numbers, batch-norm statistics and whatever else is its own.
If a replica lies on several ranks, those of the first one have their parameters among what is their own, by name.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hvdtrain.core.slots import Layout
from hvdtrain.ranks.comm import Comm


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
    per_rank: Mapping[str, Stateful]  # parts that each rank has for itself
    where: Layout = field(default_factory=Layout)

    @property
    def models(self) -> list[nn.Module]:
        """Those whose buffers are each rank's own."""
        return [self.model, *([] if self.average is None else [self.average])]


def shared_state(state: State) -> dict[str, Any]:
    """What all ranks have alike; the tensors are those in use."""
    shared_parts = {name: part.state_dict() for name, part in state.shared.items()}
    if state.where.ranks > 1:
        return shared_parts
    return {
        **_model_state(state),
        "optimizer": state.optimizer.state_dict(),
        "parameters": list(_trained_parameters(state)),  # the names of the optimizer's numbers
        **shared_parts,
    }


def _model_state(state: State) -> dict[str, Any]:
    average = None if state.average is None else _parameters(state.average)
    return {"model": _parameters(state.model), "average": average}


def _trained_parameters(state: State) -> dict[str, nn.Parameter]:
    """What the optimizer steps, by name, in its order."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return {names[id(parameter)]: parameter for group in state.optimizer.param_groups for parameter in group["params"]}


def _part_state(state: State) -> dict[str, Any]:
    """What this rank has of the whole model, by names; `sliced` are the dimensions in which it has but a slice."""
    held = {name: state.optimizer.state.get(parameter, {}) for name, parameter in _trained_parameters(state).items()}
    return {**_model_state(state), "held": held, "sliced": state.where.split_dimensions(state.model)}


def as_part(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a whole model's `shared_state` has, as the `per_rank_state` of a part."""
    remembered = saved["optimizer"]["state"]
    held = {name: remembered.get(number, {}) for number, name in enumerate(saved["parameters"])}
    return {"part": {"model": saved["model"], "average": saved["average"], "held": held, "sliced": {}}}


def join_parts(rank_states: Iterable[Mapping[str, Any]], state: State, *, fits: bool) -> dict[str, Any]:
    """What this rank needs of the `per_rank_state` of parts, as `shared_state` of a whole model has it.

    One after the other is looked at. Where they were cut as this run is, it `fits`, they are this rank's alone.
    """
    own_state, gathered, sliced = _part_state(state), dict[str, dict[str, list[Any]]](), dict[str, int]()
    for rank_state in rank_states:
        part = rank_state["part"]
        sliced |= {} if fits else part["sliced"]
        for kind in ("model", "average", "held"):
            for name in own_state[kind] or ():
                if part[kind] is not None and name in part[kind]:
                    gathered.setdefault(kind, {}).setdefault(name, []).append(part[kind][name])
    sliced_here = {} if fits else own_state["sliced"]
    number, count = state.where.rank, state.where.ranks

    def merge(name: str, values: list[Any]) -> Any:
        if isinstance(values[0], Mapping):  # what the optimizer remembers
            return {key: merge(name, [value[key] for value in values]) for key in values[0]}
        if not isinstance(values[0], torch.Tensor) or values[0].dim() == 0:
            return values[0]
        full = torch.cat(values, sliced[name]) if name in sliced else values[0]
        return full.chunk(count, sliced_here[name])[number] if name in sliced_here else full

    merged = {kind: {name: merge(name, values) for name, values in named.items()} for kind, named in gathered.items()}
    return {"model": {}, "average": None, "held": {}, **merged}


def per_rank_state(state: State) -> dict[str, Any]:
    """What this rank has for itself; the tensors are those in use."""
    version, generator_state, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (libraries use it)
    return {
        "python": [version, torch.tensor(generator_state), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(state.device) if state.device.type == "cuda" else None,
        "buffers": [dict(model.named_buffers()) for model in state.models],
        **({"part": _part_state(state)} if state.where.ranks > 1 and state.comm.data.rank == 0 else {}),
        **{name: part.state_dict() for name, part in state.per_rank.items()},
    }


def average_state(rank_states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What another number of ranks continues with: the floating buffers' means, the first rank's other buffers.

    Each part of a replica has buffers of its own. The `rank_states` are read one after the other, so that memory holds
    two of them at most.
    """
    buffers: list[dict[str, Any]] = []
    sums: dict[tuple[int, str], torch.Tensor] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for rank_state in rank_states:
        for index, values in enumerate(rank_state["buffers"]):
            if index == len(buffers):
                buffers.append({})
            for name, value in values.items():
                counts[index, name] += 1
                if counts[index, name] > 1:
                    if value.is_floating_point():
                        sums[index, name].add_(value)
                    continue
                buffers[index][name] = value
                if value.is_floating_point():
                    sums[index, name] = value.to(torch.float64, copy=True)
    for (index, name), total in sums.items():
        buffers[index][name] = (total / counts[index, name]).to(buffers[index][name].dtype)
    return {"buffers": buffers}


def restore(state: State, saved: Mapping[str, Any], rank_state: Mapping[str, Any], *, step: int) -> None:
    """Bring back `shared_state`, and this rank's `per_rank_state` or the `average_state` of all.

    With that mean random numbers are new ones, drawn from the seed, the step and the rank, and what else was a rank's
    own begins anew.
    """
    restore_shared(state, saved)
    restore_buffers(state, rank_state["buffers"])
    if rank_state.keys() == {"buffers"}:
        seeds = np.random.SeedSequence([state.seed, step, state.where.stream(state.comm)])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        return
    _restore_random(rank_state, state.device)
    for name, part in state.per_rank.items():
        if name in rank_state:
            part.load_state_dict(rank_state[name])


def restore_shared(state: State, saved: Mapping[str, Any]) -> None:
    """Bring back `shared_state` alone."""
    _restore_parameters(state.model, saved["model"])
    if state.average is not None and saved["average"] is not None:
        _restore_parameters(state.average, saved["average"])
    _restore_optimizer(
        state.optimizer, _optimizer_state(saved["held"], state) if "held" in saved else saved["optimizer"]
    )
    for name, part in state.shared.items():
        if saved.get(name):  # else the part did nothing, as a scaler without fp16, or was not there
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


def _optimizer_state(held: Mapping[str, Any], state: State) -> dict[str, Any]:
    """An optimizer's state dict from what it remembers by name."""
    numbers = {number: held[name] for number, name in enumerate(_trained_parameters(state)) if held[name]}
    return {**state.optimizer.state_dict(), "state": numbers}


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """What it remembers of each parameter; its options, as weight decay, are the command line's."""
    current_options = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    initial = {parameter: dict(held) for parameter, held in optimizer.state.items()}
    optimizer.load_state_dict(saved)
    for parameter, held in initial.items():  # what was not saved stays as it began
        optimizer.state[parameter] = held | optimizer.state.get(parameter, {})
    for parameter, held in optimizer.state.items():  # torch's fused kernels take it to lie as the parameter does
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                held[name] = torch.empty_like(parameter).copy_(value)
    for group, options in zip(optimizer.param_groups, current_options, strict=True):
        group.update(options)


def _restore_random(rank_state: Mapping[str, Any], device: torch.device) -> None:
    version, generator_state, gauss = rank_state["python"]
    random.setstate((version, tuple(generator_state.tolist()), gauss))
    keys, *remaining = rank_state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *remaining))  # noqa: NPY002
    torch.set_rng_state(rank_state["torch"])
    if device.type == "cuda" and rank_state["cuda"] is not None:
        torch.cuda.set_rng_state(rank_state["cuda"], device)
