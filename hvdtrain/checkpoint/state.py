"""All that training needs to go on exactly where it was, as tensors, numbers and words.

What ranks have in common is rank 0's; each has random numbers, batch-norm statistics and recent losses of its own.
"""

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.train.training import Training


def shared(training: Training) -> dict[str, Any]:
    """What all ranks have alike; the tensors are those in use."""
    step = training.step
    return {
        "model": step.model.state_dict(),
        "average": None if training.average is None else training.average.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "scaler": step.scaler.state_dict(),
        "skipped_in_a_row": training.limits.skipped_in_a_row,
    }


def own(training: Training) -> bytes:
    """What this rank has for itself."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (whatever a library draws from)
    content = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(training.device) if training.device.type == "cuda" else None,
        "buffers": [dict(model.named_buffers()) for model in _models(training)],
        "losses": list(training.spikes.recent),
    }
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()


def restore(training: Training, state: dict[str, Any], ranks: Sequence[Tensor], *, step: int) -> None:
    """Bring back `shared` and each rank's `own`; with another number of ranks their mean statistics.

    Then random numbers are new ones, drawn from the seed, the step and the rank.
    """
    now = training.step
    now.model.load_state_dict(state["model"])
    if training.average is not None and state["average"] is not None:
        training.average.load_state_dict(state["average"])
    _restore_optimizer(now.optimizer, state["optimizer"])
    if state["scaler"]:  # else the precision was another one
        now.scaler.load_state_dict(state["scaler"])
    training.limits.skipped_in_a_row = state["skipped_in_a_row"]
    if len(ranks) == now.comm.size:
        mine = _unpacked(ranks[now.comm.rank])
        _restore_random(mine, training.device)
        training.spikes.recent.extend(mine["losses"])
        everyones = [mine]
    else:
        everyones = [_unpacked(one) for one in ranks]
        seeds = np.random.SeedSequence([training.config.seed, step, now.comm.rank])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    for place, model in enumerate(_models(training)):
        buffers = dict(model.named_buffers())
        for name, first in everyones[0]["buffers"][place].items():
            values = [one["buffers"][place][name] for one in everyones]
            buffers[name].copy_(torch.stack(values).mean(0) if first.is_floating_point() else first)


def _models(training: Training) -> list[nn.Module]:
    return [training.step.model, *([] if training.average is None else [training.average])]


def _unpacked(packed: Tensor) -> dict[str, Any]:
    return dict(torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True))


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """What it remembers of each parameter; its options, as weight decay, are the command line's."""
    given = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
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
