"""Replicas of several ranks each: rank = replica x stages + stage, so that neighbours share a host.

Horovod's world is then the replicas of one stage; what the stages of a replica, or all ranks, tell each other goes over
mpi4py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain.groups.members import MpiMembers
from hvdtrain.ranks.comm import Comm, Group, HorovodComm
from hvdtrain.ranks.sync import Waiting
from hvdtrain.safety.exits import BadInput


class StagedComm:
    """All ranks of a run whose replicas are cut into stages."""

    def __init__(self, world: HorovodComm, mpi: Any, stages: int) -> None:
        replica, stage = divmod(world.rank, stages)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self._world = world
        self._sums = MpiMembers(mpi)
        self._data = HorovodComm(mpi.Split(stage, replica), is_world=False)
        self._stages = MpiMembers(mpi.Split(replica, stage))

    @property
    def waiting(self) -> Callable[[], AbstractContextManager[None]]:
        return self._world.waiting

    @waiting.setter
    def waiting(self, waiting: Waiting) -> None:
        self._world.waiting = self._data.waiting = self._sums.waiting = self._stages.waiting = waiting

    @property
    def data(self) -> Group:
        return self._data

    @property
    def near(self) -> Group:
        return self._data

    @property
    def stages(self) -> MpiMembers:
        return self._stages

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


def staged(comm: Comm, stages: int) -> Comm:
    """The same ranks as replicas of so many stages each; BadInput on all of them where they cannot be."""
    if stages == 1:
        return comm
    if comm.size % stages:
        below = comm.size // stages * stages
        fitting = " or ".join(str(ranks) for ranks in (below, below + stages) if ranks)
        fewer = max(count for count in range(1, comm.size + 1) if comm.size % count == 0 and count < stages)
        raise BadInput(
            f"--stages {stages}: {comm.size} rank{'s' if comm.size > 1 else ''} cannot be replicas of {stages} ranks "
            f"each: start {fitting}, or give --stages {fewer}"
        )
    if not isinstance(comm, HorovodComm) or comm.over_mpi is None:
        raise BadInput(f"--stages {stages} needs MPI between the ranks: start with mpirun or hvdlaunch")
    return StagedComm(comm, comm.over_mpi, stages)
