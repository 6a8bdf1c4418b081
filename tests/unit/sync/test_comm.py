import socket

import pytest
import torch

from hvdtrain.ranks.comm import HorovodComm, SerialComm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.safety.exits import BadInput
from hvdtrain.sync.comm import group_ranks
from hvdtrain.sync.groups import GroupSums
from tests.ranks import Mpi, together


@pytest.mark.parametrize(("ranks", "group_size"), [(2, 1), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("count", [1, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_each_rank_carries_its_part_and_all_get_the_sum_over_groups(ranks, group_size, count, dtype):
    def program(comm):
        mpi, (group, place) = Mpi(comm), divmod(comm.rank, group_size)
        across = mpi.Split(place, group)
        sent = []
        allreduce = across.Allreduce
        across.Allreduce = lambda own, total: (sent.append(len(own)), allreduce(own, total))
        between = GroupSums(MpiMembers(mpi.Split(group, place)), MpiMembers(across))
        values = (torch.arange(count) + 100**group).to(dtype)
        between.sum_(values)
        return between.groups, sent, values.tolist()

    groups = ranks // group_size
    total = [groups * number + sum(100**group for group in range(groups)) for number in range(count)]
    assert together(ranks, program) == [(groups, [-(-count // group_size)], total)] * ranks


class Hosts(HorovodComm):
    """Ranks on these hosts, over MPI or not."""

    def __init__(self, *hosts, mpi="MPI"):
        self.rank, self.size, self._hosts, self._mpi = 0, len(hosts), list(hosts), mpi

    def allgather(self, value):
        assert value == socket.gethostname()
        return self._hosts


@pytest.mark.parametrize(
    ("comm", "group_size", "line"),
    [
        (SerialComm(), None, "--sync needs several ranks with MPI between them: start with mpirun, hvdlaunch or "),
        (Hosts("a", "b", mpi=None), None, "--sync needs several ranks with MPI between them: start with mpirun, "),
        (Hosts("a", "a"), None, "--sync spares the link between hosts, and all 2 ranks are on a: leave it out, or "),
        (Hosts("a", "a", "b"), None, r"--sync needs as many ranks on each host \(a 2, b 1\): start as many, or give "),
        (Hosts("a", "b", "a", "b"), None, "--sync: the ranks of a host are not neighbours: place them by slot, as "),
        (Hosts(*"abcdef"), 4, "--sync-group-size 4: 6 ranks make groups of 1, 2, 3$"),
        (Hosts("a", "b"), 2, "--sync-group-size 2: 2 ranks make groups of 1$"),
    ],
)
def test_groups_that_cannot_be_are_one_line(comm, group_size, line):
    with pytest.raises(BadInput, match=f"^{line}"):
        group_ranks(comm, group_size)
