"""The whole model again, from the parts of its replica."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.ranks.comm import Comm
from hvdtrain.tensor.linear import slices_of

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16)}


def whole_on_0(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
    """On rank 0 the state dict of all stages or slices of its replica, in their order; elsewhere nothing.

    All ranks call it.
    """
    own, sliced = model.state_dict(), slices_of(model)
    if comm.replica.size == 1 or comm.data.rank > 0:
        return dict(own) if comm.rank == 0 else {}
    described = [[name, list(value.shape), str(value.dtype)] for name, value in own.items()]
    of_parts = comm.replica.allgather(described)
    if comm.replica.rank > 0:
        for value in own.values():
            dist.send(value.contiguous(), 0)
        return {}
    device = next(iter(own.values())).device
    found = {name: [value] for name, value in own.items()}
    for part, theirs in enumerate(of_parts[1:], start=1):
        for name, shape, dtype in theirs:
            value = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
            dist.recv(value, part)
            if name in sliced or name not in found:
                found.setdefault(name, []).append(value)
    return {name: torch.cat(parts, sliced[name]) if name in sliced else parts[0] for name, parts in found.items()}
