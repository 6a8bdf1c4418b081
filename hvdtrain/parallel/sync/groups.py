"""Groups of ranks connected by a slow link: Horovod sums inside a group, MPI between groups.

Rank = group x group size + position in the group. Values that the ranks of a group share are divided into as many parts
as the group has ranks, and each rank exchanges its part with the ranks at its position in the other groups: no element
crosses a network card twice.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hvdtrain.core.host_copies import copy_to_host
from hvdtrain.ranks.comm import HorovodComm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.ranks.wire import bits, change_together
from hvdtrain.settings.safety.calls import WORLD


class GroupSums:
    """The groups, as seen by one rank."""

    def __init__(self, group: MpiMembers, between_groups: MpiMembers) -> None:
        self.groups = between_groups.size
        self._group, self._between_groups = group, between_groups

    def sum_(self, values: Tensor) -> None:
        """Replace a flat tensor, equal on all ranks of a group, by its sum over groups."""
        padded = nn.functional.pad(values.detach(), (0, -len(values) % self._group.size))
        own_part = copy_to_host(padded.view(self._group.size, -1)[self._group.rank])
        self._between_groups.sum_(own_part)
        values.copy_(self._group.allgather_tensor(own_part)[: len(values)], non_blocking=True)


class Groups(MpiMembers):
    """The ranks with a whole replica each, in groups."""

    def __init__(self, mpi: Any, group_size: int, name: str = WORLD) -> None:
        """Split the ranks of the communicator `mpi`, the group with this name, into groups."""
        group, place = divmod(mpi.rank, group_size)
        group_mpi = mpi.Split(group, place)
        of_whole = "" if name == WORLD else f"{name} "
        group_name, place_name = f"{of_whole}group {group}", f"{of_whole}place {place}"
        self.group = HorovodComm(group_mpi, is_world=False, group=group_name)
        self.start = self.group.start
        in_group = MpiMembers(group_mpi.Dup(), group=group_name)
        between_groups = MpiMembers(mpi.Split(place, group), group=place_name)
        self.sums = GroupSums(in_group, between_groups)
        super().__init__(mpi, self.group, in_group, between_groups, group=name)

    def sum_by_levels(self, values: Tensor, name: str) -> None:
        """Replace a flat tensor by its sum over all ranks: first in the group by Horovod, then over groups."""
        self.group.begin_sum(values, name)()
        self.sums.sum_(values)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        values = [bits(tensor) for tensor in tensors]
        self.group.broadcast_(values)
        for dtype in dict.fromkeys(value.dtype for value in values):  # in the same order on all ranks
            same_dtype = [value for value in values if value.dtype == dtype]
            change_together(same_dtype, self._from_first_group)

    def _from_first_group(self, flat: Tensor) -> Tensor:
        if self.rank >= self.group.size:
            flat.zero_()
        self.sums.sum_(flat)
        return flat
