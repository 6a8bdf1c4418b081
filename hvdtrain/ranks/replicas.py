"""Whether all ranks of the data group still hold the same parameters, bit by bit."""

import hashlib
from collections import Counter

from torch import nn

from hvdtrain.ranks.comm import Group
from hvdtrain.safety.exits import REPLICAS_DIFFER, EndOfRun


def parameter_hashes(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bits, by name."""
    return {
        name: hashlib.sha256(parameter.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def weights_hash(hashes: dict[str, str]) -> str:
    """One hash for all parameters."""
    return hashlib.sha256("".join(hashes.values()).encode()).hexdigest()


def check_replicas(group: Group, model: nn.Module, step: int) -> None:
    """End the run on all ranks with status 4 where a rank's parameters differ in a single bit.

    The ranks are named that differ from what most have (on a tie, from rank 0), with the first parameter that does.
    """
    hashes = parameter_hashes(model)
    wholes = group.allgather(weights_hash(hashes))
    if len(set(wholes)) == 1:
        return
    hashes_by_rank = group.allgather(hashes)
    counts = Counter(wholes)
    usual = max(wholes, key=lambda whole: counts[whole])  # the first of the most frequent
    reference = hashes_by_rank[wholes.index(usual)]
    odd = [rank for rank, whole in enumerate(wholes) if whole != usual]
    name = next(name for name in reference if hashes_by_rank[odd[0]][name] != reference[name])
    ranks = ", ".join(str(rank) for rank in odd)
    raise EndOfRun(
        f"replicas differ after step {step}: rank {ranks} from the others, first in {name}; "
        "start again from a checkpoint before this, and check that host's memory",
        status=REPLICAS_DIFFER,
        reason="replicas differ",
    )
