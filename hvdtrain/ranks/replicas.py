"""Whether all ranks of the data group still hold the same parameters, bit by bit."""

import hashlib
import json
from collections import Counter

import torch
from torch import Tensor, nn

from hvdtrain.ranks.comm import Members
from hvdtrain.safety.exits import REPLICAS_DIFFER, EndOfRun

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def parameter_hashes(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bits, by name."""
    return {
        name: hashlib.sha256(parameter.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def weights_hash(hashes: dict[str, str]) -> str:
    """One hash for all parameters."""
    return hashlib.sha256("".join(hashes.values()).encode()).hexdigest()


def parameter_sums(model: nn.Module) -> Tensor:
    """The sum of each parameter's bits, read as integers: int64 of shape (parameters,), on their device.

    Any flipped bit changes the sum of its parameter; the order of the elements does not matter.
    """
    sums = [
        parameter.detach().view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
        for parameter in model.parameters()
    ]
    return torch.stack(sums)


def check_replicas(group: Members, model: nn.Module, step: int, *, first: int = 0) -> None:
    """End the run on all ranks with status 4 where a rank's parameters differ in a single bit.

    The ranks are named that differ from what most have (on a tie, from the first), with the first parameter that does.
    `first` is the rank of the group's first one.
    """
    sums = parameter_sums(model).tolist()
    wholes = group.allgather(hashlib.sha256(json.dumps(sums).encode()).hexdigest())
    if len(set(wholes)) == 1:
        return
    sums_by_rank = group.allgather(sums)
    counts = Counter(wholes)
    usual = max(wholes, key=lambda whole: counts[whole])  # the first of the most frequent
    reference = sums_by_rank[wholes.index(usual)]
    odd = [rank for rank, whole in enumerate(wholes) if whole != usual]
    names = [name for name, _ in model.named_parameters()]
    name = next(name for name, one, other in zip(names, sums_by_rank[odd[0]], reference, strict=True) if one != other)
    ranks = ", ".join(str(first + rank) for rank in odd)
    raise EndOfRun(
        f"replicas differ after step {step}: rank {ranks} from the others, first in {name}; "
        "start again from a checkpoint before this, and check that host's memory",
        status=REPLICAS_DIFFER,
        reason="replicas differ",
    )
