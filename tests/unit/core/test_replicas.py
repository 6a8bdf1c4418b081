import copy
import hashlib
import itertools
import math

import pytest
import torch
from torch import nn

from hvdtrain.core import replicas
from hvdtrain.core.replicas import check_replicas, parameter_hashes, parameter_sums, weights_hash
from hvdtrain.core.slots import Layout
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import REPLICAS_DIFFER, EndOfRun
from hvdtrain.vision import models
from tests.ranks import Rank
from tests.refusals import require_facts


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


def test_equal_replicas_pass_and_only_one_hash_is_sent():
    model = net()
    comm = ranks_with(model, copy.deepcopy(model), copy.deepcopy(model))
    check_replicas(comm, Layout(), model, 7)
    assert [len(hashed) for hashed in comm.said] == [64]
    check_replicas(SerialComm(), Layout(), model, 7)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_names_the_odd_one_out_of_three_and_the_parameter(odd, rank):
    replicas = [net() for _ in range(3)]
    replicas[odd] = with_flipped_bit(with_flipped_bit(net(), "3.weight", 5), "1.bias", 2)
    with pytest.raises(EndOfRun) as end:
        check_replicas(ranks_with(*replicas, rank=rank), Layout(), replicas[rank], 40)
    assert (end.value.status, end.value.reason) == (REPLICAS_DIFFER, "replicas differ")
    assert REPLICAS_DIFFER == 4
    message = str(end.value)
    require_facts(message, f"after step 40: rank {odd} ... 1.bias")
    assert "\n" not in message


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_that_differ_rank_1_is_named(rank):
    replicas = [with_flipped_bit(net(), "0.weight"), net()]
    with pytest.raises(EndOfRun, match=r"rank 1 .* first in 0\.weight\."):
        check_replicas(ranks_with(*replicas, rank=rank), Layout(), replicas[rank], 1)


def test_all_ranks_that_differ_are_named():
    other = with_flipped_bit(net(), "3.bias", bit=31)
    with pytest.raises(EndOfRun, match=r"rank 1, 3 .* first in 3\.bias\."):
        check_replicas(ranks_with(net(), other, net(), other), Layout(), net(), 1)  # a tie
    third = with_flipped_bit(net(), "1.weight")
    with pytest.raises(EndOfRun, match=r"rank 0, 4 .* first in 1\.weight\."):
        check_replicas(ranks_with(third, net(), net(), net(), other), Layout(), third, 1)


@pytest.mark.parametrize("rank", [4, 7])
def test_in_a_group_of_replicas_the_ranks_with_the_same_part_are_compared(rank):
    """The ranks 4 to 7 of 8 are two replicas of two parts each."""
    where = Layout()
    where.ranks, where.part = 2, "part"
    first, second = net(), with_flipped_bit(net(), "0.weight")
    fine = [first, second, copy.deepcopy(first), copy.deepcopy(second)]
    check_replicas(Rank(rank, 8), where, fine[rank - 4], 1, group=ranks_with(*fine, rank=rank - 4))
    odd = [*fine[:3], with_flipped_bit(net(), "3.bias")]
    with pytest.raises(EndOfRun, match=r"rank 7 .* of part 1.* first in 0\.weight\."):
        check_replicas(Rank(rank, 8), where, odd[rank - 4], 1, group=ranks_with(*odd, rank=rank - 4))


def test_running_statistics_may_differ():
    model, other = net(), net()
    other[1].running_mean.add_(1.0)
    check_replicas(ranks_with(model, other), Layout(), model, 1)


def test_replicas_of_nan_are_equal_bit_by_bit():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = math.nan
    check_replicas(ranks_with(model, copy.deepcopy(model)), Layout(), model, 1)


def test_no_parameter_is_hashed_nor_copied_to_the_cpu(monkeypatch):
    """That took longer than the whole rest of a save."""
    model, hashed = net(), []
    monkeypatch.setattr(replicas, "parameter_hashes", None)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    original = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda content: hashed.append(len(content)) or original(content))
    check_replicas(SerialComm(), Layout(), model, 1)
    assert hashed
    assert sum(hashed) < 25 * len(list(model.parameters()))


# --- sums


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.0, math.nan, math.inf, 448.0])
def test_any_flipped_bit_of_any_kind_of_number_changes_its_sum(kind, value):
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((5,), value).to(kind), requires_grad=False)
    before, seen = parameter_sums(model), set()
    for bit in range(8 * kind.itemsize):
        flipped = torch.tensor(1).bitwise_left_shift(bit).to(integers)
        model.weight.view(integers)[3] ^= flipped
        seen.add(parameter_sums(model).item())
        model.weight.view(integers)[3] ^= flipped
    assert torch.equal(parameter_sums(model), before)
    assert len(seen - {before.item()}) >= 8 * kind.itemsize / 2
    assert before.item() not in seen


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
@pytest.mark.parametrize("element", [0, 57, -1])
def test_one_flipped_bit_changes_the_sum_of_its_parameter_alone(bit, element):
    before, after = parameter_sums(net()), parameter_sums(with_flipped_bit(net(), "0.weight", element, bit))
    assert (before.dtype, before.shape) == (torch.int64, (6,))
    assert before.ne(after).tolist() == [True, False, False, False, False, False]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 2, 2)])
def test_any_two_swapped_elements_change_the_sum_of_their_parameter(kind, shape):
    model = nn.Module()
    values = torch.arange(1, math.prod(shape) + 1, dtype=torch.uint8)  # as float8: all different, none NaN
    model.weight = nn.Parameter(values.view(torch.float8_e4m3fn).to(kind).view(shape), requires_grad=False)
    before = parameter_sums(model)
    bits = model.weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.itemsize]).view(-1)
    for one, other in itertools.combinations(range(len(bits)), 2):
        bits[[one, other]] = bits[[other, one]]
        assert not torch.equal(parameter_sums(model), before), (one, other)
        bits[[one, other]] = bits[[other, one]]
    assert torch.equal(parameter_sums(model), before)


def test_swapped_kernels_are_found():
    model, other = net(), net()
    with torch.no_grad():
        other[0].weight[:] = model[0].weight[[1, 0, 2, 3]]
    with pytest.raises(EndOfRun, match=r"rank 1 .* first in 0\.weight\."):
        check_replicas(ranks_with(model, other), Layout(), model, 1)


def test_sums_mind_no_memory_format():
    model = nn.Conv2d(3, 4, 3)
    before = parameter_sums(model)
    assert torch.equal(parameter_sums(model.to(memory_format=torch.channels_last)), before)


# --- hashes


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
@pytest.mark.parametrize("element", [0, 57, -1])
def test_one_flipped_bit_of_one_float_changes_the_hash_of_its_parameter_alone(bit, element):
    before, after = parameter_hashes(net()), parameter_hashes(with_flipped_bit(net(), "0.weight", element, bit))
    assert before.keys() == after.keys() == {name for name, _ in net().named_parameters()}
    assert [name for name in before if before[name] != after[name]] == ["0.weight"]
    assert weights_hash(before) != weights_hash(after)


def test_minus_zero_is_not_zero():
    zero, minus = net(), net()
    with torch.no_grad():
        zero[3].bias.fill_(0.0)
        minus[3].bias.fill_(-0.0)
    assert torch.equal(zero[3].bias, minus[3].bias)
    assert parameter_hashes(zero)["3.bias"] != parameter_hashes(minus)["3.bias"]
    assert weights_hash(parameter_hashes(zero)) != weights_hash(parameter_hashes(minus))


def test_weights_hash_sees_one_changed_weight_and_no_memory_format():
    model = nn.Conv2d(3, 4, 3)
    first = weights_hash(parameter_hashes(model))
    assert len(first) == 64
    assert weights_hash(parameter_hashes(model.to(memory_format=torch.channels_last))) == first
    with torch.no_grad():
        model.weight[2, 1, 0, 0] = math.pi
    assert weights_hash(parameter_hashes(model)) != first


def test_hashes_are_of_every_parameter_and_change_none():
    model = models.build("efficientnet_tiny", classes=10)
    before = copy.deepcopy(model.state_dict())
    hashes = parameter_hashes(model)
    assert list(hashes) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
