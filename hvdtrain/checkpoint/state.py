"""The complete state of a training for an exact resume, as tensors, numbers and strings.

Shared state is rank 0's. Random numbers, buffers and other per-rank state are saved for each rank. If a
replica is split over several ranks, the ranks of the first replica save their parameters as per-rank state, by name.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hvdtrain.core.layout import Layout
from hvdtrain.core.model import batch_norm
from hvdtrain.core.model import state as model_state
from hvdtrain.core.model.state import ModelState
from hvdtrain.core.random_state import seed_generators
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe.own import restore_groups

OF_MODEL = ("model", "average", "optimizer")  # in the `shared_state` of a whole model
OWN = "own"  # name of the part that holds a program's own values, which may be tensors


class Stateful(Protocol):
    """An object that can be saved and restored: a module, an optimizer, a scaler, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore the state."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The parts of a running training."""

    comm: Comm
    device: torch.device
    seed: int
    model: nn.Module
    average: nn.Module | None  # the moving average of the model
    optimizer: torch.optim.Optimizer
    shared: Mapping[str, Stateful]  # other parts that are equal on all ranks
    per_rank: Mapping[str, Stateful]  # parts that differ between ranks
    where: Layout = field(default_factory=Layout)
    how: GradientSync = field(default_factory=GradientSync)  # may divide the optimizer's state over ranks
    averaged_buffers: Callable[[nn.Module], Collection[str]] = batch_norm.running_statistics  # see Task

    @property
    def models(self) -> list[nn.Module]:
        """The models whose buffers differ between ranks."""
        return [self.model, *([] if self.average is None else [self.average])]

    def of_models(self) -> list[ModelState]:
        """Return the state of each model now."""
        return [model_state.state_of(model) for model in self.models]


def shared_state(state: State, models: list[ModelState] | None = None) -> dict[str, Any]:
    """Return the state that is equal on all ranks; tensors are not copied. `models` is `of_models`, if it is known."""
    shared_parts = {name: part.state_dict() for name, part in state.shared.items()}
    if state.comm.replica.size > 1:
        return shared_parts
    return {
        **_model_state(models or state.of_models()),
        "optimizer": state.optimizer.state_dict(),
        "parameters": list(_trained_parameters(state)),  # names for the optimizer's parameter numbers
        **shared_parts,
    }


def _model_state(models: list[ModelState]) -> dict[str, Any]:
    model, *average = (one.without_buffers for one in models)
    return {"model": model, "average": average[0] if average else None}


def _trained_parameters(state: State) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by name, in its order."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return {names[id(parameter)]: parameter for group in state.optimizer.param_groups for parameter in group["params"]}


def _part_state(state: State, models: list[ModelState]) -> dict[str, Any]:
    """Return this rank's part of the model, by name; `sliced` has the split dimension of each sliced parameter."""
    held = {name: state.optimizer.state.get(parameter, {}) for name, parameter in _trained_parameters(state).items()}
    return {
        **_model_state(models),
        "held": held,
        "param_groups": state.optimizer.state_dict()["param_groups"],
        "sliced": state.where.part.split_dimensions(state.model),
    }


def as_part(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the `shared_state` of a whole model to the `per_rank_state` of a part."""
    remembered = saved["optimizer"]["state"]
    held = {name: remembered.get(number, {}) for number, name in enumerate(saved["parameters"])}
    whole = {name: saved[name] for name in ("model", "average")}
    return {"part": {**whole, "held": held, "param_groups": saved["optimizer"].get("param_groups", []), "sliced": {}}}


def join_parts(rank_states: Iterable[Mapping[str, Any]], state: State, *, fits: bool) -> dict[str, Any]:
    """Combine the parts' `per_rank_state` into this rank's share of a whole model's `shared_state`.

    The parts are read one by one. If they were split like this run (`fits`), the only part is this rank's own.
    """
    models = _model_state(state.of_models())
    names = {name for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    gathered, sliced, groups = dict[str, dict[str, list[Any]]](), dict[str, int](), list[Any]()
    for rank_state in rank_states:
        part = rank_state["part"]
        sliced |= {} if fits else part["sliced"]
        groups = groups or part.get("param_groups", [])
        for kind in ("model", "average", "held"):
            for name in {**models, "held": names}[kind] or ():
                if part[kind] is not None and name in part[kind]:
                    gathered.setdefault(kind, {}).setdefault(name, []).append(part[kind][name])
    sliced_here = {} if fits else state.where.part.split_dimensions(state.model)
    number, count = state.comm.replica.rank, state.comm.replica.size

    def merge(name: str, values: list[Any]) -> Any:
        if isinstance(values[0], Mapping):  # optimizer state
            return {key: merge(name, [value[key] for value in values]) for key in values[0]}
        if not isinstance(values[0], torch.Tensor) or values[0].dim() == 0:
            return values[0]
        full = torch.cat(values, sliced[name]) if name in sliced else values[0]
        return full.chunk(count, sliced_here[name])[number] if name in sliced_here else full

    merged = {kind: {name: merge(name, values) for name, values in named.items()} for kind, named in gathered.items()}
    return {"model": {}, "average": None, "held": {}, "optimizer": {"param_groups": groups}, **merged}


def per_rank_state(state: State, models: list[ModelState] | None = None) -> dict[str, Any]:
    """Return the state that differs between ranks; tensors are not copied. `models` is `of_models`, if it is known."""
    models = models or state.of_models()
    version, generator_state, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (libraries use it)
    return {
        "python": [version, torch.tensor(generator_state), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(state.device) if state.device.type == "cuda" else None,
        "buffers": [model.buffers for model in models],
        "averaged": list(state.averaged_buffers(state.model)),
        "extra": models[0].extra,
        **({"part": _part_state(state, models)} if state.comm.replica.size > 1 and state.comm.data.rank == 0 else {}),
        **{name: part.state_dict() for name, part in state.per_rank.items()},
    }


def average_state(rank_states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state for another number of ranks: means of the buffers to average, other buffers of the first rank.

    Each part of a replica has different buffers. The `rank_states` are read one by one, so that at most two are in
    memory.
    """
    buffers: list[dict[str, Any]] = []
    sums: dict[tuple[int, str], torch.Tensor] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for rank_state in rank_states:
        averaged = {*rank_state["averaged"], *(f"module.{name}" for name in rank_state["averaged"])}
        for index, values in enumerate(rank_state["buffers"]):
            if index == len(buffers):
                buffers.append({})
            for name, value in values.items():
                is_averaged = name in averaged and value.is_floating_point()
                first = buffers[index].setdefault(name, value)
                if is_averaged and (index, name) not in counts:
                    sums[index, name] = value.to(torch.float64, copy=True)
                elif is_averaged and value.shape == first.shape:
                    sums[index, name].add_(value)
                else:
                    continue
                counts[index, name] += 1
    for (index, name), total in sums.items():
        buffers[index][name] = (total / counts[index, name]).to(buffers[index][name].dtype)
    return {"buffers": buffers}


def restore(state: State, saved: Mapping[str, Any], rank_state: Mapping[str, Any], *, step: int) -> None:
    """Restore `shared_state`, and this rank's `per_rank_state` or the `average_state` of all ranks.

    With the average, random numbers are seeded from seed, step and rank, and other per-rank state starts fresh.
    """
    restore_shared(state, saved)
    restore_buffers(state, rank_state["buffers"])
    if rank_state.keys() == {"buffers"}:
        seeds = np.random.SeedSequence([state.seed, step, state.where.part.stream(state.comm)])
        seed_generators(int(seeds.generate_state(1, np.uint64)[0]))
        return
    _restore_random(rank_state, state.device)
    model_state.set_extra_state(state.model, rank_state["extra"])
    for name, part in state.per_rank.items():
        if name in rank_state:
            part.load_state_dict(rank_state[name])


def restore_shared(state: State, saved: Mapping[str, Any]) -> None:
    """Restore only `shared_state`."""
    _restore_parameters(state.model, saved["model"])
    if state.average is not None and saved["average"] is not None:
        _restore_parameters(state.average, saved["average"])
    held = (saved if "held" in saved else as_part(saved)["part"])["held"]
    parameters = dict(state.model.named_parameters())
    _restore_optimizer(state.optimizer, state.how.split({parameters[name]: values for name, values in held.items()}))
    restore_groups(state.optimizer, saved.get("optimizer", {}).get("param_groups", ()))
    for name, part in state.shared.items():
        if saved.get(name):  # else the part had no state, for example a scaler without fp16, or did not exist
            part.load_state_dict(saved[name])


def restore_buffers(state: State, saved: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Restore a rank's own buffers, for example running statistics, of each model by name."""
    for model, values in zip(state.models, saved, strict=True):
        _require_all(model_state.state_of(model).buffers, values)
        # A stage of a model that was saved whole has a part of its modules, and Identity for others.
        here = {name for name, module in model.named_modules() if type(module) is not nn.Identity}
        model_state.set_buffers(model, {name: one for name, one in values.items() if name.rpartition(".")[0] in here})


def _restore_parameters(model: nn.Module, saved: Mapping[str, Any]) -> None:
    _require_all(model_state.state_of(model).without_buffers, saved)
    model.load_state_dict({**model.state_dict(), **saved})


def _require_all(names: Iterable[str], saved: Mapping[str, Any]) -> None:
    if missing := set(names) - saved.keys():
        raise KeyError(f"no {min(missing)}")


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[nn.Parameter, dict[str, Any]]) -> None:
    """Restore the optimizer's state per parameter; its options, such as weight decay, come from the command line."""
    initial = {parameter: dict(held) for parameter, held in optimizer.state.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {number: saved[parameter] for number, parameter in enumerate(parameters) if saved.get(parameter)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": numbers})
    for parameter, held in initial.items():  # values that were not saved keep their initial state
        optimizer.state[parameter] = held | optimizer.state.get(parameter, {})
    for parameter, held in optimizer.state.items():  # torch's fused kernels require the parameter's memory layout
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                held[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _restore_random(rank_state: Mapping[str, Any], device: torch.device) -> None:
    version, generator_state, gauss = rank_state["python"]
    random.setstate((version, tuple(generator_state.tolist()), gauss))
    keys, *remaining = rank_state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *remaining))  # noqa: NPY002
    torch.set_rng_state(rank_state["torch"])
    if device.type == "cuda" and rank_state["cuda"] is not None:
        torch.cuda.set_rng_state(rank_state["cuda"], device)
