"""Checks that all ranks of the data group hold bit-identical parameters."""

import hashlib
import json
from collections import Counter

import torch
from torch import Tensor, nn

from hvdtrain.core.layout import Layout
from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.ranks.wire import bits
from hvdtrain.settings.safety.errors import ReplicasDifferError
from hvdtrain.settings.safety.exits import REPLICAS_DIFFER


def parameter_hashes(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter's bits, by name."""
    return {
        name: hashlib.sha256(bits(parameter).cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def whole_hash(comm: Comm, model: nn.Module) -> str:
    """Return one hash for the parameters of all parts of a replica; it does not depend on how the replica is split."""
    hashes: dict[str, dict[str, None]] = {}
    for part_hashes in comm.replica.allgather(parameter_hashes(model)):
        for name, part_hash in part_hashes.items():
            hashes.setdefault(name, {})[part_hash] = None  # once if several ranks hold the whole parameter
    return weights_hash({name: "".join(parts) for name, parts in hashes.items()})


def weights_hash(hashes: dict[str, str]) -> str:
    """Combine the hashes of all parameters into one."""
    return hashlib.sha256("".join(hashes.values()).encode()).hexdigest()


def parameter_sums(model: nn.Module) -> Tensor:
    """Return a checksum of each parameter: the sum of its bits, read as integers, times an odd weight per position.

    The sums are int64 of shape (parameters,), on the parameters' device. The sum changes if one element changes, or if
    two unequal elements of at most 32 bits are swapped.
    """
    return torch.stack([_sum_by_place(bits(parameter)) for parameter in model.parameters()])


def _sum_by_place(values: Tensor) -> Tensor:
    """Return the sum of (2 i + 1) x values[i] over the row-major index i, modulo 2**64, without a copy of them all."""
    if values.dim() < 2:
        values = values.reshape(1, -1)
    rows = values.sum(dim=tuple(range(1, values.dim())), dtype=torch.int64)  # R rows
    columns = values.sum(dim=0, dtype=torch.int64).flatten()  # C columns
    row_places = torch.arange(len(rows), device=values.device) * len(columns)
    column_places = torch.arange(len(columns), device=values.device)
    return (rows * 2 * row_places).sum() + (columns * (2 * column_places + 1)).sum()


def check_replicas(comm: Comm, where: Layout, model: nn.Module, step: int, *, group: Members | None = None) -> None:
    """End the run on all ranks with status 4 if a rank's parameters are not bit-identical to those of its replicas.

    Also compare the parameters that every rank of a split replica holds whole. The message names the first parameter
    that differs, and the ranks that differ from the majority (in a tie, from the first rank). If `group` is passed,
    only its ranks are compared.
    """
    names = [name for name, _ in model.named_parameters()]
    ranks = comm if group is None else group
    sums = dict(zip(names, parameter_sums(model).tolist(), strict=True))
    of_part = f" of {where.part.kind} {{}}" if where.part.kind else ""
    _require_equal(comm, ranks, sums, step, every=comm.replica.size, of_part=of_part)
    if split := where.part.split_dimensions(model):
        whole = {name: total for name, total in sums.items() if name not in split}
        _require_equal(comm, ranks, whole, step, every=1)


def _require_equal(
    comm: Comm, ranks: Members, sums: dict[str, int], step: int, *, every: int, of_part: str = ""
) -> None:
    """Raise EndOfRun on all `ranks` if a rank's sums differ from those of its peers, which are `every` ranks apart."""
    digests = ranks.allgather(hashlib.sha256(json.dumps(list(sums.values())).encode()).hexdigest())
    differing = [part for part in range(every) if len(set(digests[part::every])) > 1]
    if not differing:
        return
    peers = range(differing[0], ranks.size, every)  # the ranks that must be equal
    sums_by_rank = ranks.allgather(sums)
    counts = Counter(digests[rank] for rank in peers)
    majority = max(peers, key=lambda rank: counts[digests[rank]])  # the first rank of the largest group of equal ranks
    reference = sums_by_rank[majority]
    differing_ranks = [rank for rank in peers if digests[rank] != digests[majority]]
    name = next(name for name, total in sums_by_rank[differing_ranks[0]].items() if total != reference[name])
    names = ", ".join(str(comm.rank - ranks.rank + rank) for rank in differing_ranks)
    raise ReplicasDifferError(
        f"replicas differ after step {step}: rank {names} from the others{of_part.format(differing[0])}, first in "
        f"{name}. Check the memory of that host, and go back by --resume-from STEP to a checkpoint before this step.",
        status=REPLICAS_DIFFER,
        reason="replicas differ",
    )
