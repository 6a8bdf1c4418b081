"""What each part does when ranks are lost in the middle of it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.step import Witness
from hvdtrain.parallel.elastic.undo import Undo
from hvdtrain.ranks.sync import GradientSync
from tests.ranks import together
from tests.steps import run_step, same, step_of
from tests.unit.ranks.test_buckets import MIB, Net, Sync, alone, assert_equal, inputs_of
from tests.unit.ranks.test_buckets import step as gradients_of


class Torn(GradientSync):
    """A sync whose sums fail in the passes that are told; gradients are there by then."""

    def __init__(self):
        self.fails = False

    def finish(self):
        if self.fails:
            raise ConnectionError


class TornLater(Witness):
    """As a sync that fails, but once gradients are unscaled."""

    fails = False

    def refuse(self, step):
        if self.fails:
            raise ConnectionError


def noisy():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    ).train()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6)


def everything(step):
    """Its weights, running statistics, momenta and loss scale, and the random state."""
    return copy.deepcopy(
        [step.model.state_dict(), step.optimizer.state_dict()["state"], step.scaler.state_dict(), torch.get_rng_state()]
    )


def noisy_step(**options):
    model = noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    torch.manual_seed(1)
    return step_of(model, optimizer=optimizer, scaler=GradScaler("cpu", init_scale=64.0), **options)


@pytest.mark.parametrize("torn", [Torn(), TornLater()])
def test_a_step_whose_sums_failed_is_undone(torn):
    undo = Undo()
    step = noisy_step(sync=torn, witnesses=[undo]) if isinstance(torn, Torn) else noisy_step(witnesses=[undo, torn])
    run_step(step, batch(1), batch(1), lr=0.01)
    before = everything(step)
    torn.fails = True
    with pytest.raises(ConnectionError):
        run_step(step, batch(2), batch(2), lr=0.01)
    assert not same(before, everything(step))  # running statistics and random numbers have gone on
    undo.undo(step)
    for name, value in before[0].items():
        if "num_batches" not in name:  # batch norm's own count is of passes, not of steps
            assert torch.equal(value, step.model.state_dict()[name]), name
    assert same(before[1:], everything(step)[1:])
    torn.fails = False
    done = run_step(step, batch(2), batch(2), lr=0.01)
    after = everything(step)

    plain = noisy_step()
    for number in (1, 2):
        usual = run_step(plain, batch(number), batch(number), lr=0.01)
    assert done.totals == usual.totals
    assert same(after[1:], everything(plain)[1:])
    assert same(*(list(one.model.parameters()) for one in (step, plain)))


def test_a_step_that_is_done_is_not_undone():
    undo = Undo()
    step = noisy_step(witnesses=[undo])
    run_step(step, batch(1), lr=0.01)
    after = everything(step)
    undo.undo(step)
    assert same(after, everything(step))


@pytest.mark.parametrize("when", ["in the first step", "in a later one"])
def test_buckets_of_a_step_that_was_not_finished_are_forgotten(when):
    """Two ranks are as many as there were, but the buckets are made anew, in the order of the next step."""

    def program(comm):
        model = Net()
        sync = Sync(comm, model, bucket_mb=72 / MIB)
        if when == "in a later one":
            gradients_of(sync, [partial(model, inputs_of(comm.rank))])
        sync.expect(2)
        model(inputs_of(comm.rank, 1)).backward()
        if when == "in a later one":
            model(inputs_of(comm.rank, 1)).backward()  # all are sent, and none has come
            assert all(bucket.wait is not None for bucket in sync._buckets)
        sync.restart(comm.size)
        assert all(parameter.grad is None for parameter in model.parameters())
        return [gradients_of(sync, [partial(model, inputs_of(comm.rank, number), "cab")]) for number in (2, 3)]

    expected = [
        alone(Net(), [[lambda twin, rank=rank, n=n: twin(inputs_of(rank, n), "cab")] for rank in range(2)])
        for n in (2, 3)
    ]
    for found in together(2, program):
        for ours, theirs in zip(found, expected, strict=True):
            assert_equal(ours, theirs)
