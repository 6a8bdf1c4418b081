"""Replicas of several ranks each, which hold its stages, or slices of its layers; neighbours share a host.

With P such parts rank = replica x P + part. Horovod's world is then the replicas of one part; what the parts of a
replica, or all ranks, tell each other goes over mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.ranks.comm import Comm, Group, HorovodComm, ReplicaPart
from hvdtrain.safety.exits import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.ranks.sync import Waiting
    from hvdtrain.sync.members import MpiMembers

OPTIONS: Mapping[ReplicaPart, str] = {"all": "--stages", "stage": "--stages", "slice": "--tensor"}


class PartsComm:
    """All ranks of a run whose replicas are cut into parts."""

    def __init__(self, world: HorovodComm, mpi: Any, parts: int, part: ReplicaPart) -> None:
        from hvdtrain.sync.members import MpiMembers

        replica, own = divmod(world.rank, parts)
        self.part: ReplicaPart = part
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self._world = world
        self._sums = MpiMembers(mpi)
        self._data = HorovodComm(mpi.Split(own, replica), is_world=False)
        self._replica = MpiMembers(mpi.Split(replica, own))

    @property
    def waiting(self) -> Callable[[], AbstractContextManager[None]]:
        return self._world.waiting

    @waiting.setter
    def waiting(self, waiting: Waiting) -> None:
        self._world.waiting = self._data.waiting = self._sums.waiting = self._replica.waiting = waiting

    @property
    def data(self) -> Group:
        return self._data

    @property
    def near(self) -> Group:
        return self._data

    @property
    def replica(self) -> MpiMembers:
        return self._replica

    def allgather(self, value: Any) -> list[Any]:
        return self._sums.allgather(value)

    def gather(self, content: bytes) -> list[bytes]:
        return self._world.gather(content)

    def broadcast(self, content: bytes) -> bytes:
        return self._world.broadcast(content)

    def start(self, timeline: Path | None = None) -> None:
        self._data.start(timeline)

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        return self._sums.allreduce(values, name)

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        return self._sums.begin_sum(values, name)


def in_parts(comm: Comm, parts: int, part: ReplicaPart) -> Comm:
    """The same ranks as replicas of so many parts each; BadInput on all of them where they cannot be."""
    if parts == 1:
        return comm
    option = OPTIONS[part]
    require_replicas(comm.size, parts, part)
    if not isinstance(comm, HorovodComm) or comm.over_mpi is None:
        raise BadInput(f"{option} {parts} needs MPI between the ranks: start with mpirun or hvdlaunch")
    return PartsComm(comm, comm.over_mpi, parts, part)


def require_replicas(ranks: int, parts: int, part: ReplicaPart) -> None:
    """Raise BadInput where so many ranks are not whole replicas of so many parts each."""
    if ranks % parts == 0:
        return
    below = ranks // parts * parts
    fitting = " or ".join(str(whole) for whole in (below, below + parts) if whole)
    fewer = max(count for count in range(1, ranks + 1) if ranks % count == 0 and count < parts)
    raise BadInput(
        f"{OPTIONS[part]} {parts}: {ranks} rank{'s' if ranks > 1 else ''} cannot be replicas of {parts} ranks each: "
        f"start {fitting}, or give {OPTIONS[part]} {fewer}"
    )


def require_groups(part: ReplicaPart, parts: int, placed: Mapping[str, Any] | None) -> None:
    """Raise BadInput where hvdlaunch has `placed` other groups of ranks than the parts of a replica are."""
    if placed is None:
        return
    ranks = placed.get("ranks_per_replica")
    if (ranks or 1) != parts:
        given = "without --ranks-per-replica" if ranks is None else f"with --ranks-per-replica {ranks}"
        raise BadInput(f"{OPTIONS[part]} {parts}: hvdlaunch was started {given}: give it --ranks-per-replica {parts}")


def require_parts(
    part: ReplicaPart,
    parts: int,
    *,
    ranks: int,
    placed: Mapping[str, Any] | None,
    besides: BadInput | None = None,
) -> None:
    """Raise one BadInput where hvdlaunch's groups or the number of ranks do not fit, with what is wrong `besides`."""
    lines = [] if besides is None else [str(besides)]
    for check in (partial(require_groups, part, parts, placed), partial(require_replicas, ranks, parts, part)):
        try:
            check()
        except BadInput as error:
            # what is missing `besides` needs these parts: fewer of them are no remedy
            lines.append(str(error) if besides is None else str(error).partition(", or give ")[0])
    if lines:
        raise BadInput("; ".join(lines))
