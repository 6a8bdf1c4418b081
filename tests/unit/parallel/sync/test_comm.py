import socket
import sys
from unittest.mock import Mock

import pytest
import torch

from hvdtrain.core.replica.parts import split_replicas
from hvdtrain.parallel.sync.comm import _count_replicas_per_host, group_ranks
from hvdtrain.parallel.sync.groups import GroupSums
from hvdtrain.ranks.comm import HorovodComm, SerialComm
from hvdtrain.ranks.members import MpiMembers
from tests.ranks import Mpi, Rank, together
from tests.refusals import refused, require_facts


@pytest.mark.parametrize(
    ("ranks", "group_size", "count", "dtype"),
    [(2, 1, 5, torch.float32), (6, 3, 5, torch.float16), (6, 2, 1, torch.int64), (4, 2, 12, torch.float16)],
)
def test_each_rank_carries_its_part_and_all_get_the_sum_over_groups(ranks, group_size, count, dtype):
    def program(comm):
        mpi, (group, place) = Mpi(comm), divmod(comm.rank, group_size)
        across = mpi.Split(place, group)
        sent = []
        allreduce, alltoall = across.Allreduce, across.Alltoall
        across.Allreduce = lambda own, total: (sent.append(own.nbytes), allreduce(own, total))
        across.Alltoall = lambda own, total: (sent.append(own.nbytes), alltoall(own, total))
        between = GroupSums(MpiMembers(mpi.Split(group, place)), MpiMembers(across))
        values = (torch.arange(count) + 10**group).to(dtype)
        between.sum_(values)
        return between.groups, sent, values.tolist()

    groups = ranks // group_size
    total = [groups * number + sum(10**group for group in range(groups)) for number in range(count)]
    part = -(-count // group_size)
    if dtype == torch.float16:  # the first half of an all-reduce; what is gathered then is the other
        part = -(-part // groups) * groups
    assert together(ranks, program) == [(groups, [part * dtype.itemsize], total)] * ranks


class Replicas(HorovodComm):
    """Ranks with the same part each, over MPI or not."""

    def __init__(self, size, mpi):
        self.rank, self.size, self.mpi = 0, size, mpi


class Hosts(SerialComm):
    """Ranks on these hosts, in replicas of `parts` ranks."""

    def __init__(self, *hosts, mpi="MPI", parts=1):
        self.size, self._hosts = len(hosts), list(hosts)
        self._data, self._replica = Replicas(len(hosts) // parts, mpi), Rank(0, parts)

    data = property(lambda self: self._data)
    replica = property(lambda self: self._replica)

    def allgather(self, value):
        assert value == socket.gethostname()
        return self._hosts


@pytest.mark.parametrize(
    ("comm", "group_size", "line"),
    [
        (SerialComm(), None, "--sync ... several ranks with MPI ... mpirun, hvdlaunch or "),
        (Hosts("a", "a"), None, "--sync: all 2 ranks are on a ... --sync two-level/2"),
        (Hosts("a", "a", "b"), None, "--sync ... equally many ranks ... (a 2, b 1) ... --sync two-level/2"),
        (Hosts("a", "b", "a", "b"), None, "--sync: ... not neighbours ... hvdlaunch"),
        (Hosts(*"abcdef"), 4, "--sync: 6 ranks ... groups of 4 ... 1, 2, 3, as in --sync two-level/3."),
        (Hosts("a", "b", parts=2), 1, "--sync ... several replicas ... more ranks"),
        (Hosts(*"aabb", parts=2), 2, "--sync: 2 replicas ... groups of 2 ... 1, as in --sync two-level/1."),
        (Hosts(*"aaabbb", parts=2), None, "--sync: a host has 3 ranks ... a replica 2 ... multiple of 2"),
    ],
)
def test_groups_that_cannot_be_are_one_line(comm, group_size, line):
    require_facts(refused(lambda: group_ranks(comm, group_size)), line)


def test_by_itself_a_group_is_the_replicas_of_a_host():
    assert _count_replicas_per_host(list("aaaabbbb"), 2) == 2


@pytest.mark.parametrize(("parts", "group_size"), [(1, 4), (2, 2)])
def test_groups_of_replicas_are_groups_of_the_ranks_with_each_part(monkeypatch, parts, group_size):
    """8 ranks: what is summed over all data, and over groups, is of ranks with the same part."""
    monkeypatch.setitem(sys.modules, "mpi4py", Mock())
    place = parts * group_size  # the ranks of a group

    def program(comm):
        mesh = group_ranks(split_replicas(HorovodComm(Mpi(comm)), parts, "--stages"), group_size)
        of_data = mesh.data.allreduce(torch.tensor([10**comm.rank])).item()
        values = torch.tensor([number(comm.rank // place, comm.rank % parts)])  # equal in a group
        mesh.data.sums.sum_(values)
        assert (mesh.sync_group.rank, mesh.sync_group.size) == (comm.rank % place, place)
        assert (mesh.rank, mesh.size, mesh.replica.size, mesh.data.rank) == (comm.rank, 8, parts, comm.rank // parts)
        return of_data, values.item()

    def number(group, part):
        return 10 ** (group * parts + part)

    for rank, (of_data, of_groups) in enumerate(together(8, program)):
        assert of_data == sum(10**other for other in range(rank % parts, 8, parts))
        assert of_groups == sum(number(group, rank % parts) for group in range(8 // place))
