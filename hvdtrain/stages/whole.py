"""The whole model again, from its stages."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.ranks.comm import Comm

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16)}


def whole_on_0(comm: Comm, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0 the tensors of all stages of its replica by name, in their order; elsewhere nothing.

    All ranks call it.
    """
    if comm.stages.size == 1 or comm.data.rank > 0:
        return dict(own) if comm.rank == 0 else {}
    described = [[name, list(value.shape), str(value.dtype)] for name, value in own.items()]
    of_stages = comm.stages.allgather(described)
    if comm.stages.rank > 0:
        for value in own.values():
            dist.send(value.contiguous(), 0)
        return {}
    device = next(iter(own.values())).device
    whole = dict(own)
    for stage, theirs in enumerate(of_stages[1:], start=1):
        for name, shape, dtype in theirs:
            value = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
            dist.recv(value, stage)
            whole.setdefault(name, value)
    return whole
