"""Makes the state of the ranks' models equal: before the first step, and before each evaluation.

Between two evaluations each rank's buffers are its own. Those that the task names are averaged over ranks; all other
buffers and the extra state are rank 0's, as in DDP.
"""

import hashlib
import io
import json
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.model import batch_norm
from hvdtrain.core.model import state as model_state
from hvdtrain.ranks.comm import ReplicaGroup
from hvdtrain.ranks.wire import bits

Averaged = list[tuple[Tensor, Tensor]]  # each tensor that was averaged, and this rank's own values


def start_equal(group: ReplicaGroup, model: nn.Module) -> None:
    """Give all ranks the state of rank 0's model, which may be random."""
    if group.size == 1:
        return
    group.broadcast_(model.parameters())
    own = model_state.state_of(model)
    if received := _from_rank_zero(group, own.buffers, own.extra):
        model_state.set_buffers(model, received["buffers"])
        model_state.set_extra_state(model, received["extra"])


def equal_models(
    group: ReplicaGroup, model: nn.Module, evaluated: Callable[[], nn.Module], names: Collection[str]
) -> tuple[nn.Module, Averaged]:
    """Return the model that `evaluated` returns, equal on all ranks, and what was averaged: the buffers of these names.

    A moving average has its own running statistics, and those of the trained model stay each rank's own. All other
    state is the trained model's.
    """
    if group.size == 1:
        return evaluated(), []
    follower = evaluated()
    statistics = set(batch_norm.running_statistics(model))
    own = model_state.state_of(model)
    tensors = {name: (follower if name in statistics else model).get_buffer(name) for name in own.buffers}
    averaged = _on_all_ranks(group, {name: tensors[name] for name in names if name in tensors})
    own_values = [(tensor, tensor.detach().clone()) for tensor in averaged.values()]
    group.average_(averaged.values())
    others = {name: tensor for name, tensor in tensors.items() if name not in averaged}
    if received := _from_rank_zero(group, others, own.extra):
        values = dict.fromkeys(others) | received["buffers"]  # None for a buffer that rank 0 does not have
        model_state.set_buffers(follower, {name: value for name, value in values.items() if name in statistics})
        model_state.set_buffers(model, {name: value for name, value in values.items() if name not in statistics})
        model_state.set_extra_state(model, received["extra"])
    return evaluated(), own_values


def _on_all_ranks(group: ReplicaGroup, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the floating-point tensors that all ranks have, in the same shape."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor.is_floating_point()}
    if _is_equal(group, json.dumps(shapes).encode()):
        return {name: tensors[name] for name in shapes}
    of_ranks = group.allgather(shapes)
    return {name: tensors[name] for name in sorted(shapes) if all(one.get(name) == shapes[name] for one in of_ranks)}


def _from_rank_zero(group: ReplicaGroup, buffers: dict[str, Tensor], extra: dict[str, Any]) -> dict[str, Any] | None:
    """Return the buffers and the extra state of rank 0, or None if this rank has them."""
    if _is_equal(group, _content(buffers, extra)):
        return None
    packed = io.BytesIO()
    torch.save({"buffers": {name: buffer.detach().cpu() for name, buffer in buffers.items()}, "extra": extra}, packed)
    content = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
    length = group.allgather(len(content))[0]
    content = content if group.rank == 0 else torch.empty(length, dtype=torch.uint8)
    group.broadcast_([content])
    received: dict[str, Any] = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
    return None if group.rank == 0 else received


def _content(buffers: dict[str, Tensor], extra: dict[str, Any]) -> bytes:
    """Return all values as bytes, with a single copy from a GPU."""
    dense = {name: buffer for name, buffer in buffers.items() if buffer.layout == torch.strided and buffer.numel()}
    kinds = {name: (str(buffer.dtype), list(buffer.shape)) for name, buffer in dense.items()}
    others = {name: buffer.detach().cpu() for name, buffer in buffers.items() if name not in dense}
    packed = io.BytesIO()
    torch.save({"kinds": kinds, "others": others, "extra": extra}, packed)
    flat = [bits(buffer).contiguous().flatten().view(torch.uint8) for buffer in dense.values()]
    return packed.getvalue() + (torch.cat(flat).cpu().numpy().tobytes() if flat else b"")


def _is_equal(group: ReplicaGroup, content: bytes | memoryview) -> bool:
    return len(set(group.allgather(hashlib.sha256(content).hexdigest()))) == 1
