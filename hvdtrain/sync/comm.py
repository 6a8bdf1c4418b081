"""Groups of ranks that a slow link joins: inside a group Horovod sums, between groups MPI does.

Rank = group x size of a group + place in it. What the ranks of a group have alike is cut into as many parts as it has
ranks, and each rank carries its part to the others with its place: a network card passes on no element twice.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.ranks.comm import Comm, Group, HorovodComm, Members, Reducer, SerialComm
from hvdtrain.safety.exits import BadInput

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.ranks.members import MpiMembers
    from hvdtrain.ranks.sync import GradientSync, WaitContext


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """How often groups of ranks meet."""

    steps: int
    from_epoch: int = 0  # before it at every step


class GroupSums:
    """The groups, as one rank of each sees them."""

    def __init__(self, group: MpiMembers, between_groups: MpiMembers) -> None:
        self.groups = between_groups.size
        self._group, self._between_groups = group, between_groups

    def sum_(self, values: Tensor) -> None:
        """Replace a flat tensor, which is equal on all ranks of a group, by its sum over groups."""
        import torch.nn.functional as F

        padded = F.pad(values.detach().cpu(), (0, -len(values) % self._group.size))
        own_part = padded.view(self._group.size, -1)[self._group.rank].clone()
        self._between_groups.sum_(own_part)
        values.copy_(self._group.allgather_tensor(own_part)[: len(values)])


class HostsComm:
    """All ranks of a run, in groups; its `data` are all of them."""

    def __init__(self, world: HorovodComm, mpi: Any, group_size: int) -> None:
        from hvdtrain.ranks.members import MpiMembers

        group, place = divmod(world.rank, group_size)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self._world, self._all = world, MpiMembers(mpi)
        group_mpi = mpi.Split(group, place)
        self._group = HorovodComm(group_mpi, is_world=False)
        self._in_group, self._between_groups = MpiMembers(group_mpi.Dup()), MpiMembers(mpi.Split(place, group))
        self.group_sums = GroupSums(self._in_group, self._between_groups)

    @property
    def wait_context(self) -> Callable[[], AbstractContextManager[None]]:
        return self._world.wait_context

    @wait_context.setter
    def wait_context(self, wait_context: WaitContext) -> None:
        for members in (self._world, self._all, self._group, self._in_group, self._between_groups):
            members.wait_context = wait_context

    @property
    def data(self) -> Group:
        return self

    @property
    def sync_group(self) -> Group:
        return self._group

    @property
    def replica(self) -> Members:
        return SerialComm()

    def allgather(self, value: Any) -> list[Any]:
        return self._all.allgather(value)

    def gather(self, content: bytes) -> list[bytes]:
        return self._world.gather(content)

    def broadcast(self, content: bytes) -> bytes:
        return self._world.broadcast(content)

    def start(self, timeline: Path | None = None) -> None:
        self._group.start(timeline)

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        return self._all.allreduce(values, name)

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        return self._all.begin_sum(values, name)

    def average_(self, tensors: Iterable[Tensor]) -> None:
        self._all.average_(tensors)

    def broadcast_(self, model: nn.Module) -> None:
        import torch

        self._group.broadcast_(model)
        values = list(model.state_dict().values())
        for dtype in dict.fromkeys(value.dtype for value in values):  # in the same order on all ranks
            same_dtype = [value for value in values if value.dtype == dtype]
            flat = torch.cat([value.flatten() for value in same_dtype])
            if self.rank >= self._group.size:
                flat.zero_()
            self.group_sums.sum_(flat)
            for value, part in zip(same_dtype, flat.split([value.numel() for value in same_dtype]), strict=True):
                value.copy_(part.view_as(value))

    def gradient_sync(
        self,
        model: nn.Module,
        *,
        compression: str,
        loss_is_scaled: bool = False,
        reducer: Reducer = "bucket",
        groups: int | None = None,
        bucket_mb: float | None = None,
    ) -> GradientSync:
        from hvdtrain.sync.two_level import TwoLevelSync

        in_group = self._group.gradient_sync(
            model,
            compression=compression,
            loss_is_scaled=loss_is_scaled,
            reducer=reducer,
            groups=groups,
            bucket_mb=bucket_mb,
        )
        return TwoLevelSync(in_group, model, self.group_sums.sum_)


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
    return HostsComm(comm, comm.mpi_comm, group_size)


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
