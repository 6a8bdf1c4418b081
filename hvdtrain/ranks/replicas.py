"""Whether all ranks of the data group still hold the same parameters, bit by bit."""

import hashlib
import json
from collections import Counter

import torch
from torch import Tensor, nn

from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.safety.exits import REPLICAS_DIFFER, EndOfRun

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def parameter_hashes(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bits, by name."""
    return {
        name: hashlib.sha256(parameter.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def whole_hash(comm: Comm, model: nn.Module) -> str:
    """One hash for all parameters, those of all stages: whether it is cut does not matter."""
    hashes: dict[str, str] = {}
    for theirs in comm.stages.allgather(parameter_hashes(model)):
        hashes |= theirs
    return weights_hash(hashes)


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


def check_replicas(comm: Comm, model: nn.Module, step: int, *, together: Members | None = None) -> None:
    """End the run on all ranks with status 4 where the parameters of a rank differ in a single bit from its replicas'.

    The ranks are named that differ from what most have (on a tie, from the first), with the first parameter that does.
    `together` are those of all ranks that are compared, where these are not all.
    """
    names = [name for name, _ in model.named_parameters()]
    ranks = comm if together is None else together
    sums = dict(zip(names, parameter_sums(model).tolist(), strict=True))
    wholes = ranks.allgather(hashlib.sha256(json.dumps(list(sums.values())).encode()).hexdigest())
    stages = comm.stages.size
    differing = [stage for stage in range(stages) if len(set(wholes[stage::stages])) > 1]
    if not differing:
        return
    alike = range(differing[0], ranks.size, stages)  # the ranks that should be
    sums_by_rank = ranks.allgather(sums)
    counts = Counter(wholes[rank] for rank in alike)
    usual = max(alike, key=lambda rank: counts[wholes[rank]])  # the first that most are like
    reference = sums_by_rank[usual]
    odd = [rank for rank in alike if wholes[rank] != wholes[usual]]
    name = next(name for name, total in sums_by_rank[odd[0]].items() if total != reference[name])
    named = ", ".join(str(comm.rank - ranks.rank + rank) for rank in odd)
    of_stage = f" of stage {differing[0]}" if stages > 1 else ""
    raise EndOfRun(
        f"replicas differ after step {step}: rank {named} from the others{of_stage}, first in {name}; "
        "start again from a checkpoint before this, and check that host's memory",
        status=REPLICAS_DIFFER,
        reason="replicas differ",
    )
