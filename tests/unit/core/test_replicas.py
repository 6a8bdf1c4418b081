import copy
import hashlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.core.layout import Layout
from hvdtrain.core.replicas import check_replicas, parameter_sums
from hvdtrain.settings.safety.errors import ReplicasDifferError
from tests.ranks import Rank
from tests.refusals import ended


def ranks_with(*replicas, rank=0):
    """Rank `rank` among ranks that have these models, and ask and answer the same."""

    def answers(value):
        sums = [parameter_sums(model).tolist() for model in replicas]
        names = [name for name, _ in replicas[0].named_parameters()]
        by_name = [dict(zip(names, one, strict=True)) for one in sums]
        by_rank = (
            by_name if isinstance(value, dict) else [hashlib.sha256(str(one).encode()).hexdigest() for one in sums]
        )
        assert by_rank[rank] == value
        return by_rank

    return Rank(rank, len(replicas), answers=answers)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def with_flipped_bit(model, name, element=0, bit=0):
    changed = copy.deepcopy(model)
    changed.get_parameter(name).detach().view(torch.int32).flatten()[element] ^= 1 << bit
    return changed


def test_equal_replicas_pass_whatever_their_running_statistics_and_only_one_hash_is_sent():
    model, other = net(), net()
    with torch.no_grad():
        for one in (model, other):
            one[0].weight[0, 0, 0, 0] = math.nan
    other[1].running_mean.add_(1.0)
    comm = ranks_with(model, other)
    check_replicas(comm, Layout(), model, 7)
    assert [len(hashed) for hashed in comm.said] == [64]


@pytest.mark.parametrize(("odd", "rank"), [(0, 1), (1, 0), (2, 2)])
def test_every_rank_names_the_odd_one_out_of_three_and_the_parameter(odd, rank):
    replicas = [net() for _ in range(3)]
    replicas[odd] = with_flipped_bit(with_flipped_bit(net(), "3.weight", 5), "1.bias", 2)
    attempt = partial(check_replicas, ranks_with(*replicas, rank=rank), Layout(), replicas[rank], 40)
    assert ended(attempt, rf"after step 40: rank {odd} .*1\.bias") == (4, "replicas differ")


def test_all_ranks_that_differ_are_named():
    other = with_flipped_bit(net(), "3.bias", bit=31)
    with pytest.raises(ReplicasDifferError, match=r"rank 1, 3 .* first in 3\.bias\."):
        check_replicas(ranks_with(net(), other, net(), other), Layout(), net(), 1)  # a tie
    third = with_flipped_bit(net(), "1.weight")
    with pytest.raises(ReplicasDifferError, match=r"rank 0, 4 .* first in 1\.weight\."):
        check_replicas(ranks_with(third, net(), net(), net(), other), Layout(), third, 1)


class Halves(Rank):
    """Each replica is split over two of the ranks."""

    replica = Rank(size=2)


@pytest.mark.parametrize("rank", [4, 7])
def test_in_a_group_of_replicas_the_ranks_with_the_same_part_are_compared(rank):
    """The ranks 4 to 7 of 8 are two replicas of two parts each."""
    where = Layout()
    where.part = SimpleNamespace(kind="part", split_dimensions=lambda _: {})
    first, second = net(), with_flipped_bit(net(), "0.weight")
    fine = [first, second, copy.deepcopy(first), copy.deepcopy(second)]
    check_replicas(Halves(rank, 8), where, fine[rank - 4], 1, group=ranks_with(*fine, rank=rank - 4))
    odd = [*fine[:3], with_flipped_bit(net(), "3.bias")]
    with pytest.raises(ReplicasDifferError, match=r"rank 7 .* of part 1.* first in 0\.weight\."):
        check_replicas(Halves(rank, 8), where, odd[rank - 4], 1, group=ranks_with(*odd, rank=rank - 4))


KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn])
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@KINDS
def test_any_flipped_bit_of_any_kind_of_number_changes_its_sum(kind):
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([0.0, -0.0, 1.5, math.nan, 448.0]).to(kind), requires_grad=False)
    before, bits = parameter_sums(model), model.weight.view(INTEGERS[kind.itemsize])
    for element in range(5):
        for bit in range(8 * kind.itemsize):
            flipped = torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
            bits[element] ^= flipped
            assert not torch.equal(parameter_sums(model), before), (element, bit)
            bits[element] ^= flipped
    assert torch.equal(parameter_sums(model), before)


@KINDS
def test_swapped_elements_change_the_sum(kind):
    model = nn.Module()
    values = torch.arange(1, 25, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all different, none NaN
    model.weight = nn.Parameter(values.to(kind), requires_grad=False)
    before, bits = parameter_sums(model), model.weight.view(INTEGERS[kind.itemsize])
    for other in range(1, 24):
        bits[[0, other]] = bits[[other, 0]]
        assert not torch.equal(parameter_sums(model), before), other
        bits[[0, other]] = bits[[other, 0]]
