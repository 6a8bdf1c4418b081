"""Which ranks make a group that a slow link joins with others, and how often groups meet."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass

from hvdtrain.ranks.comm import Comm, HorovodComm
from hvdtrain.safety.exits import BadInput


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """How often groups of ranks meet."""

    steps: int
    from_epoch: int = 0  # before it at every step


def group_ranks(comm: Comm, group_size: int | None) -> Comm:
    """The same ranks in groups of so many, those of a host if not given; BadInput on all of them where it cannot be."""
    if not isinstance(comm, HorovodComm) or comm.mpi_comm is None:
        raise BadInput(
            "--sync needs several ranks with MPI between them: start with mpirun, hvdlaunch or horovodrun --mpi"
        )
    hosts = comm.allgather(socket.gethostname())
    if group_size is None:
        group_size = _count_ranks_per_host(hosts)
    if comm.size % group_size or group_size == comm.size:
        valid_sizes = [str(size) for size in range(1, comm.size) if comm.size % size == 0]
        raise BadInput(f"--sync-group-size {group_size}: {comm.size} ranks make groups of {', '.join(valid_sizes)}")
    from hvdtrain.ranks.members import MeshComm, MpiMembers
    from hvdtrain.sync.groups import Groups

    mpi = comm.mpi_comm
    sync_group = MpiMembers(mpi.Split(comm.rank // group_size, comm.rank))
    return MeshComm(comm, mpi, data=Groups(mpi, group_size), replica=comm.replica, sync_group=sync_group)


def _count_ranks_per_host(hosts: list[str]) -> int:
    """How many ranks each host has; BadInput where that makes no groups."""
    counts = Counter(hosts)
    if len(counts) == 1:
        raise BadInput(
            f"--sync spares the link between hosts, and all {len(hosts)} ranks are on {hosts[0]}: leave it out, or "
            "give --sync-group-size"
        )
    if len(set(counts.values())) > 1:
        unequal = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise BadInput(f"--sync needs as many ranks on each host ({unequal}): start as many, or give --sync-group-size")
    per_host = counts[hosts[0]]
    if any(hosts[rank] != hosts[rank - rank % per_host] for rank in range(len(hosts))):
        raise BadInput("--sync: the ranks of a host are not neighbours: place them by slot, as hvdlaunch does")
    return per_host
