"""All that training needs to go on exactly where it was, as tensors, numbers and words.

What ranks have in common is rank 0's; each has random numbers, batch-norm statistics and whatever else is its own.
"""

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

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
    own: Mapping[str, Stateful]  # parts that each rank has for itself

    @property
    def models(self) -> list[nn.Module]:
        """Those whose buffers are each rank's own."""
        return [self.model, *([] if self.average is None else [self.average])]


def shared(state: State) -> dict[str, Any]:
    """What all ranks have alike; the tensors are those in use."""
    return {
        "model": state.model.state_dict(),
        "average": None if state.average is None else state.average.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        **{name: part.state_dict() for name, part in state.shared.items()},
    }


def own(state: State) -> bytes:
    """What this rank has for itself."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (whatever a library draws from)
    content = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(state.device) if state.device.type == "cuda" else None,
        "buffers": [dict(model.named_buffers()) for model in state.models],
        **{name: part.state_dict() for name, part in state.own.items()},
    }
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()


def restore(state: State, saved: dict[str, Any], ranks: Sequence[Tensor], *, step: int) -> None:
    """Bring back `shared` and each rank's `own`; with another number of ranks their mean statistics.

    Then random numbers are new ones, drawn from the seed, the step and the rank, and what else was a rank's own begins
    anew.
    """
    state.model.load_state_dict(saved["model"])
    if state.average is not None and saved["average"] is not None:
        state.average.load_state_dict(saved["average"])
    _restore_optimizer(state.optimizer, saved["optimizer"])
    for name, part in state.shared.items():
        if saved[name]:  # else the part did nothing, as a scaler without fp16
            part.load_state_dict(saved[name])
    if len(ranks) == state.comm.size:
        mine = _unpacked(ranks[state.comm.rank])
        _restore_random(mine, state.device)
        for name, part in state.own.items():
            part.load_state_dict(mine[name])
        contents = [mine]
    else:
        contents = [_unpacked(content) for content in ranks]
        seeds = np.random.SeedSequence([state.seed, step, state.comm.rank])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    for place, model in enumerate(state.models):
        buffers = dict(model.named_buffers())
        for name, first in contents[0]["buffers"][place].items():
            values = [content["buffers"][place][name] for content in contents]
            buffers[name].copy_(torch.stack(values).mean(0) if first.is_floating_point() else first)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    return dict(torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True))


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """What it remembers of each parameter; its options, as weight decay, are the command line's."""
    given = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def _restore_random(mine: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = mine["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, *rest = mine["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(mine["torch"])
    if device.type == "cuda" and mine["cuda"] is not None:
        torch.cuda.set_rng_state(mine["cuda"], device)
