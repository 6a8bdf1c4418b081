"""Two ranks with the same gradients: a sum is twice what was sent."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.parallel.sync.compression import Uncompressed
from hvdtrain.parallel.sync.low_rank import LowRankSync
from hvdtrain.parallel.sync.power_sgd import PowerSGD
from tests.refusals import refused, require_facts

RANKS = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Linear(40, 30)).to(memory_format=torch.channels_last)


class Sent:
    """Sums, and how much was sent for them."""

    def __init__(self):
        self.elements = 0

    def __call__(self, values, name):
        self.elements += len(values)
        values *= RANKS
        return lambda: values


def sync_of(model, rank, sent=None):
    return LowRankSync(model, SimpleNamespace(size=RANKS, begin_sum=sent or Sent()), rank=rank)


def gradients(step, *, thin=None):
    """Of each parameter; `thin` makes matrices of that rank."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for one in net().parameters():
        full = torch.randn(one.shape, generator=generator)
        if thin and one.dim() > 1:
            u, s, v = torch.linalg.svd(full.flatten(1), full_matrices=False)
            s[thin:] = 0
            full = (u @ s.diag() @ v).view_as(one)
        found.append(full)
    return found


def sums(model, sync, own, *, skips=False):
    """The sums of a step that is skipped if they are not finite, or for what another rank of the replica has."""
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)
    sync.expect(1)
    sync.finish()
    is_finite = all(bool(one.grad.isfinite().all()) for one in model.parameters())
    sync.decided(torch.tensor(float(skips or not is_finite)))
    return [parameter.grad.clone() for parameter in model.parameters()]


def farthest(these, those):
    return max((one - other).abs().max().item() for one, other in zip(these, those, strict=True))


def test_matrices_of_that_rank_come_through_and_little_is_sent():
    model, sent = net(), Sent()
    own = gradients(1, thin=2)
    assert farthest(sums(model, sync_of(model, 2, sent), own), [2 * one for one in own]) < 1e-4
    assert sent.elements == 16 + 30 + 2 * (16 + 27 + 30 + 40) == PowerSGD(2).sent_bytes(model) / 4
    assert Uncompressed("none").sent_bytes(model) == 4 * sum(one.numel() for one in model.parameters())
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_what_a_step_leaves_out_comes_with_the_next_ones():
    model = net()
    sync = sync_of(model, 1)
    total = [torch.zeros_like(one) for one in model.parameters()]
    for step in range(8):
        one = sums(model, sync, gradients(step))
        total = [all_ + part for all_, part in zip(total, one, strict=True)]
    wanted = [2 * sum(parts) for parts in zip(*map(gradients, range(8)), strict=True)]
    assert farthest(total, wanted) > 0.1
    left = sync.state_dict()["error"].split([one.numel() for one in total])
    with_rest = [one + rest.view_as(one) for one, rest in zip(total, left, strict=True)]
    assert farthest(with_rest, wanted) < 1e-4


@pytest.mark.parametrize(("before", "is_finite"), [(0, False), (2, True)])  # a sum of this rank's, or another's, is not
def test_a_step_that_is_skipped_leaves_no_trace(before, is_finite):
    disturbed, calm = net(), net()
    syncs = [sync_of(disturbed, 2), sync_of(calm, 2)]
    for step in range(before):
        sums(disturbed, syncs[0], gradients(step))
        sums(calm, syncs[1], gradients(step))
    bad = gradients(7)
    if not is_finite:
        bad[2][3, 4] = torch.nan
    skipped = sums(disturbed, syncs[0], bad, skips=is_finite)
    assert all(bool(one.isfinite().all()) for one in skipped) == is_finite
    for step in range(8, 10):
        found, wanted = sums(disturbed, syncs[0], gradients(step)), sums(calm, syncs[1], gradients(step))
        assert all(one.isfinite().all() for one in found)
        if before:
            assert farthest(found, wanted) == 0


def test_it_goes_on_from_a_checkpoint_with_the_same_bits():
    model, other = net(), net()
    sync = sync_of(model, 2)
    for step in range(3):
        sums(model, sync, gradients(step))
    resumed = sync_of(other, 2)
    resumed.load_state_dict(copy.deepcopy(sync.state_dict()))
    for step in range(3, 6):
        assert farthest(sums(model, sync, gradients(step)), sums(other, resumed, gradients(step))) == 0


def test_matrices_that_would_be_larger_than_the_gradients_are_refused():
    require_facts(refused(lambda: PowerSGD(999).check(net())), "--compression powersgd:999: ... at most powersgd:8.")
    line = refused(lambda: PowerSGD(1).check(nn.Linear(2, 2)))
    require_facts(line, "--compression powersgd:1: halves no gradient ... Leave it out.")
    PowerSGD(8).check(net())
