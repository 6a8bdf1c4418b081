"""Groups of ranks connected by a slow link, and the schedule of their synchronization."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass

from hvdtrain.ranks.comm import Comm, HorovodComm
from hvdtrain.settings.safety.exits import BadInput


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """How often groups of ranks synchronize."""

    steps: int
    from_epoch: int = 0  # at every step before this epoch


def group_ranks(comm: Comm, group_size: int | None) -> Comm:
    """Split the ranks into groups of `group_size` replicas, by default those of a host.

    Raise BadInput on all ranks if that is impossible.
    """
    data, replicas, parts = comm.data, comm.data.size, comm.replica.size
    if not isinstance(data, HorovodComm) or data.mpi is None:
        raise BadInput(
            "--sync needs several ranks with MPI between them. Start with mpirun, hvdlaunch or horovodrun --mpi."
        )
    if replicas == 1:
        raise BadInput("--sync needs several replicas, and the ranks hold one. Start more ranks, or leave --sync out.")
    hosts = comm.allgather(socket.gethostname())
    if group_size is None:
        group_size = _count_replicas_per_host(hosts, parts)
    if replicas % group_size or group_size == replicas:
        valid_sizes = [str(size) for size in range(1, replicas) if replicas % size == 0]
        count = f"{replicas} replicas" if parts > 1 else f"{replicas} ranks"
        raise BadInput(
            f"--sync: {count} cannot be groups of {group_size}. Choose from {', '.join(valid_sizes)}, "
            f"as in --sync two-level/{valid_sizes[-1]}."
        )
    from hvdtrain.parallel.sync.groups import Groups
    from hvdtrain.ranks.members import MeshComm, MpiMembers

    mpi = comm.mpi if isinstance(comm, MeshComm) else data.mpi
    number = comm.rank // (group_size * parts)
    sync_group = MpiMembers(mpi.Split(number, comm.rank), group=f"group {number}")
    return MeshComm(
        comm, mpi, data=Groups(data.mpi, group_size, data.calls.group), replica=comm.replica, sync_group=sync_group
    )


def _count_replicas_per_host(hosts: list[str], parts: int) -> int:
    """Return the number of replicas, of `parts` ranks each, per host; BadInput if hosts cannot be groups."""
    counts = Counter(hosts)
    if len(counts) == 1:
        raise BadInput(
            f"--sync: all {len(hosts)} ranks are on {hosts[0]}, so no link between hosts is used. Leave --sync out, "
            "or choose a group size, as in --sync two-level/2."
        )
    if len(set(counts.values())) > 1:
        unequal = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise BadInput(
            f"--sync needs equally many ranks on each host ({unequal}). Start equally many, or choose a group size, "
            "as in --sync two-level/2."
        )
    per_host = counts[hosts[0]]
    if any(hosts[rank] != hosts[rank - rank % per_host] for rank in range(len(hosts))):
        raise BadInput("--sync: the ranks of a host are not neighbours. Place them by slot, as hvdlaunch does.")
    if per_host % parts:
        raise BadInput(
            f"--sync: a host has {per_host} ranks, a replica {parts}. Start a multiple of {parts} on each host, or "
            "choose a group size, as in --sync two-level/2."
        )
    return per_host // parts
