"""Replicas of several ranks each, which hold the parts of one model; neighbours share a host.

With P such parts rank = replica x P + part. Horovod's world is then the replicas of one part; what the parts of a
replica, or all ranks, tell each other goes over mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.ranks.comm import Comm, Group, HorovodComm
from hvdtrain.safety.exits import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.ranks.members import MpiMembers
    from hvdtrain.ranks.sync import WaitContext


class PartsComm:
    """All ranks of a run whose replicas are cut into parts."""

    def __init__(self, world: HorovodComm, mpi: Any, parts: int) -> None:
        from hvdtrain.ranks.members import MpiMembers

        replica, part = divmod(world.rank, parts)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self._world = world
        self._all = MpiMembers(mpi)
        self._data = HorovodComm(mpi.Split(part, replica), is_world=False)
        self._replica = MpiMembers(mpi.Split(replica, part))

    @property
    def wait_context(self) -> Callable[[], AbstractContextManager[None]]:
        return self._world.wait_context

    @wait_context.setter
    def wait_context(self, wait_context: WaitContext) -> None:
        for members in (self._world, self._data, self._all, self._replica):
            members.wait_context = wait_context

    @property
    def data(self) -> Group:
        return self._data

    @property
    def sync_group(self) -> Group:
        return self._data

    @property
    def replica(self) -> MpiMembers:
        return self._replica

    def allgather(self, value: Any) -> list[Any]:
        return self._all.allgather(value)

    def gather(self, content: bytes) -> list[bytes]:
        return self._world.gather(content)

    def broadcast(self, content: bytes) -> bytes:
        return self._world.broadcast(content)

    def start(self, timeline: Path | None = None) -> None:
        self._data.start(timeline)

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        return self._all.allreduce(values, name)

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        return self._all.begin_sum(values, name)


def split_replicas(comm: Comm, parts: int, option: str) -> Comm:
    """The same ranks as replicas of so many parts each; BadInput on all of them where they cannot be."""
    if parts == 1:
        return comm
    require_replicas(comm.size, parts, option)
    if not isinstance(comm, HorovodComm) or comm.mpi_comm is None:
        raise BadInput(f"{option} {parts} needs MPI between the ranks: start with mpirun or hvdlaunch")
    return PartsComm(comm, comm.mpi_comm, parts)


def require_replicas(ranks: int, parts: int, option: str) -> None:
    """Raise BadInput where so many ranks are not whole replicas of so many parts each."""
    if ranks % parts == 0:
        return
    lower = ranks // parts * parts
    valid_counts = " or ".join(str(count) for count in (lower, lower + parts) if count)
    smaller = max(count for count in range(1, ranks + 1) if ranks % count == 0 and count < parts)
    raise BadInput(
        f"{option} {parts}: {ranks} rank{'s' if ranks > 1 else ''} cannot be replicas of {parts} ranks each: "
        f"start {valid_counts}, or give {option} {smaller}"
    )


def require_groups(option: str, parts: int, placement: Mapping[str, Any] | None) -> None:
    """Raise BadInput if hvdlaunch's `placement` has other groups of ranks than the parts of a replica."""
    if placement is None:
        return
    ranks = placement.get("ranks_per_replica")
    if (ranks or 1) != parts:
        actual = "without --ranks-per-replica" if ranks is None else f"with --ranks-per-replica {ranks}"
        raise BadInput(f"{option} {parts}: hvdlaunch was started {actual}: give it --ranks-per-replica {parts}")


def require_parts(
    option: str,
    parts: int,
    *,
    ranks: int,
    placement: Mapping[str, Any] | None,
    other_error: BadInput | None = None,
) -> None:
    """Raise one BadInput where hvdlaunch's groups or the number of ranks do not fit, together with `other_error`."""
    lines = [] if other_error is None else [str(other_error)]
    for require in (partial(require_groups, option, parts, placement), partial(require_replicas, ranks, parts, option)):
        try:
            require()
        except BadInput as error:
            # what `other_error` asks for needs these parts: fewer of them are no remedy
            lines.append(str(error) if other_error is None else str(error).partition(", or give ")[0])
    if lines:
        raise BadInput("; ".join(lines))
