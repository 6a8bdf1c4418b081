"""Replicas of several ranks each: rank = replica x stages + stage, so that neighbours share a host.

Horovod's world is then the replicas of one stage; what the stages of a replica, or all ranks, tell each other goes over
mpi4py.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hvdtrain.ranks.comm import Comm, Group, HorovodComm, wait_until
from hvdtrain.ranks.sync import Waiting
from hvdtrain.safety.exits import BadInput


class MpiMembers:
    """The ranks of one of MPI's communicators; they wait politely."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.waiting: Waiting = nullcontext

    def wait(self, request: Any) -> None:
        """Return when MPI is done with a request."""
        wait_until(request.Test, self.waiting)

    def allgather(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        self.wait(self.mpi.Iallgather(np.array([len(text)]), lengths))
        texts = np.empty(int(lengths.sum()), dtype=np.uint8)
        self.wait(self.mpi.Iallgatherv(text, [texts, lengths]))
        return [json.loads(part.tobytes()) for part in np.split(texts, np.cumsum(lengths)[:-1])]

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        total = values.detach().to("cpu", copy=True)
        return self.begin_sum(total, name)().to(values.device)

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        return partial(self._sum_of, values, own := values.clone(), self.mpi.Iallreduce(own.numpy(), values.numpy()))

    def _sum_of(self, values: Tensor, own: Tensor, begun: Any) -> Tensor:  # `own` is read until then
        self.wait(begun)
        return values


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
