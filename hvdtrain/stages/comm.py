"""Replicas of several ranks each, which hold its stages, or slices of its layers; neighbours share a host.

With P such parts rank = replica x P + part. Horovod's world is then the replicas of one part; what the parts of a
replica, or all ranks, tell each other goes over mpi4py.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain.groups.members import MpiMembers
from hvdtrain.ranks.comm import Comm, Group, HorovodComm, ReplicaPart
from hvdtrain.ranks.sync import Waiting
from hvdtrain.safety.exits import BadInput

OPTIONS: Mapping[ReplicaPart, str] = {"all": "--stages", "stage": "--stages", "slice": "--tensor"}


class PartsComm:
    """All ranks of a run whose replicas are cut into parts."""

    def __init__(self, world: HorovodComm, mpi: Any, parts: int, part: ReplicaPart) -> None:
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
    if comm.size % parts:
        below = comm.size // parts * parts
        fitting = " or ".join(str(ranks) for ranks in (below, below + parts) if ranks)
        fewer = max(count for count in range(1, comm.size + 1) if comm.size % count == 0 and count < parts)
        raise BadInput(
            f"{option} {parts}: {comm.size} rank{'s' if comm.size > 1 else ''} cannot be replicas of {parts} ranks "
            f"each: start {fitting}, or give {option} {fewer}"
        )
    if not isinstance(comm, HorovodComm) or comm.over_mpi is None:
        raise BadInput(f"{option} {parts} needs MPI between the ranks: start with mpirun or hvdlaunch")
    return PartsComm(comm, comm.over_mpi, parts, part)
