"""Replicas split over several ranks; each rank holds a part of the model, and neighbours share a host.

With P parts, rank = replica x P + part. Horovod's world consists of the replicas of one part; communication between the
parts of a replica, or between all ranks, uses mpi4py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hvdtrain.ranks.comm import Comm, HorovodComm
from hvdtrain.settings.safety.exits import BadInput


def split_replicas(comm: Comm, parts: int, option: str) -> Comm:
    """Group the ranks into replicas of `parts` parts; BadInput on all ranks if that is impossible."""
    if parts == 1:
        return comm
    require_replicas(comm.size, parts, option)
    if not isinstance(comm, HorovodComm) or comm.mpi is None:
        raise BadInput(f"{option} {parts} needs MPI between the ranks. Start with mpirun or hvdlaunch.")
    from hvdtrain.ranks.members import MeshComm, MpiMembers

    mpi, (replica, part) = comm.mpi, divmod(comm.rank, parts)
    data = HorovodComm(mpi.Split(part, replica), is_world=False, group=f"part {part}")
    return MeshComm(comm, mpi, data=data, replica=MpiMembers(mpi.Split(replica, part), group=f"replica {replica}"))


def require_replicas(ranks: int, parts: int, option: str) -> None:
    """Raise BadInput if the ranks do not form whole replicas of `parts` parts."""
    if ranks % parts == 0:
        return
    lower = ranks // parts * parts
    valid_counts = " or ".join(str(count) for count in (lower, lower + parts) if count)
    smaller = max(count for count in range(1, ranks + 1) if ranks % count == 0 and count < parts)
    raise BadInput(
        f"{option} {parts}: {ranks} rank{'s' if ranks > 1 else ''} cannot be replicas of {parts} ranks each. Start "
        f"{valid_counts}, or pass {option} {smaller}."
    )


def require_groups(option: str, parts: int, placement: Mapping[str, Any] | None) -> None:
    """Raise BadInput if hvdlaunch's `placement` groups ranks differently from the parts of a replica."""
    if placement is None:
        return
    ranks = placement.get("ranks_per_replica")
    if (ranks or 1) != parts:
        actual = "without --ranks-per-replica" if ranks is None else f"with --ranks-per-replica {ranks}"
        raise BadInput(
            f"{option} {parts}: hvdlaunch was started {actual}. Pass --ranks-per-replica {parts} to hvdlaunch."
        )


def require_parts(
    option: str,
    parts: int,
    *,
    ranks: int,
    placement: Mapping[str, Any] | None,
    other_error: BadInput | None = None,
) -> None:
    """Raise one BadInput if hvdlaunch's groups or the number of ranks do not fit, combined with `other_error`."""
    lines = [] if other_error is None else [str(other_error)]
    for require in (partial(require_groups, option, parts, placement), partial(require_replicas, ranks, parts, option)):
        try:
            require()
        except BadInput as error:
            # `other_error` is about an option that needs these parts: using fewer is not a remedy
            lines.append(str(error) if other_error is None else str(error).partition(", or pass ")[0].rstrip(".") + ".")
    if lines:
        raise BadInput(" ".join(lines))
