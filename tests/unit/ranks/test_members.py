import torch

from hvdtrain.ranks.members import MpiMembers
from tests.ranks import Mpi, together


def test_values_of_any_length_are_gathered_by_rank():
    answers = together(3, lambda comm: MpiMembers(Mpi(comm)).allgather({"rank": comm.rank, "é": "x" * 10**comm.rank}))
    assert answers == [[{"rank": rank, "é": "x" * 10**rank} for rank in range(3)]] * 3


def test_a_sum_leaves_what_was_given_and_a_begun_one_takes_its_place():
    def program(comm):
        members, given, replaced = MpiMembers(Mpi(comm)), torch.tensor([comm.rank + 1.0]), torch.tensor([2, comm.rank])
        total = members.allreduce(given)
        same = members.begin_sum(replaced, "name")()
        assert same is replaced
        return given.tolist(), total.tolist(), replaced.tolist()

    assert together(2, program) == [([1.0], [3.0], [4, 1]), ([2.0], [3.0], [4, 1])]


def test_the_average_is_that_of_floating_tensors_alone():
    def program(comm):
        tensors = [torch.full((2, 2), float(comm.rank)), torch.tensor(comm.rank), torch.tensor([3.0 * comm.rank])]
        MpiMembers(Mpi(comm)).average_(tensors)
        return [tensor.tolist() for tensor in tensors]

    assert together(2, program) == [[[[0.5, 0.5], [0.5, 0.5]], rank, [1.5]] for rank in range(2)]
    assert together(2, lambda comm: MpiMembers(Mpi(comm)).average_([torch.tensor(comm.rank)])) == [None, None]


def test_fp16_is_added_in_fp32_and_has_the_same_bits_on_all_ranks():
    """In fp16 2048 + 1 is 2048, so that 2048 + 1 + 1 would stay that."""

    def program(comm):
        values = torch.tensor([2048.0 if comm.rank == 0 else 1.0, 60000.0, float(comm.rank), 0.5]).half()
        MpiMembers(Mpi(comm)).sum_(values)
        return values.dtype, values.tolist()

    assert together(3, program) == [(torch.float16, [2050.0, torch.inf, 3.0, 1.5])] * 3
