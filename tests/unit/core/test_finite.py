import math
from copy import deepcopy

import numpy as np
import pytest
import torch

from hvdtrain.core.finite import Spike, SpikeWatch, total_norm
from hvdtrain.core.parts import Part
from tests.ranks import Rank

# --- spikes


def noise(count):
    return np.random.default_rng(0).normal(size=count)


def spikes_of(losses, rank=0, count=512):
    watch = SpikeWatch(rank)
    return [spike for step, loss in enumerate(losses, start=1) if (spike := watch.see(step, loss, count))]


def test_the_eleventh_loss_is_the_first_that_may_be_a_spike():
    assert spikes_of([1.0] * 9 + [1e6]) == []
    assert spikes_of([1.0] * 10 + [100.0], rank=3) == [Spike(step=11, rank=3, loss=100.0, usual=1.0, samples=[])]


def test_noise_a_slow_rise_and_any_fall_are_no_spikes():
    rise = 1.0 + np.arange(800) / 200 + 0.02 * noise(800)
    for losses in (2.0 + 0.3 * noise(1000), rise, rise[::-1], [2.0] * 60 + [0.001] + [2.0] * 5):
        assert spikes_of(losses) == []


@pytest.mark.parametrize(
    ("usual", "loss", "found"),
    [
        (2.0, 3.9, 0),  # after constant losses, as much again
        (2.0, 4.1, 1),
        (-2.0, -0.1, 0),
        (-2.0, 0.1, 1),
        (0.0003, 0.1, 0),  # near zero, 0.1
        (0.0003, 0.11, 1),
    ],
)
def test_a_spike_is_far_above_the_usual_loss(usual, loss, found):
    assert len(spikes_of([usual] * 60 + [loss])) == found


def test_what_is_usual_for_noisy_losses_is_eight_robust_deviations():
    losses = [1.0, 2.0, 3.0] * 20  # median 2, median absolute deviation 1
    assert spikes_of([*losses, 2.0 + 8 * 1.4826 - 0.01]) == []
    assert len(spikes_of([*losses, 2.0 + 8 * 1.4826 + 0.01])) == 1


def test_of_few_samples_five_wrong_ones_are_no_spike():
    assert [len(spikes_of([0.0] * 60 + [5 * 6.0 / 32], count=count)) for count in (32, 64)] == [0, 1]


def test_8_ranks_have_no_false_alarm_in_10000_steps_and_see_factor_3_on_one():
    """The loss of 64 samples falls to 0.05, and one sample of 200 is wrong in the end."""
    draw, shape = np.random.default_rng(0), (10_000, 8, 64)
    level = np.maximum(0.05, 2.3 * np.exp(-np.arange(10_000) / 2000))[:, None]
    losses = level * draw.gamma(4.0, 0.25, shape).mean(2) + (draw.random(shape) < 0.005).mean(2) * 5.0
    watches = [SpikeWatch(rank) for rank in range(8)]
    for step, of_ranks in enumerate(losses.tolist()):
        found = [watch.see(step, loss, 64) for watch, loss in zip(watches, of_ranks, strict=True)]
        assert found == [None] * 8, step
        if step in range(100, 2000, 100):
            assert deepcopy(watches[5]).see(step, 3 * of_ranks[5], 64) is not None, step


# --- norms over the ranks that hold the parts of a model


GRADIENTS = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]


def test_parts_have_the_bits_of_the_whole_norm():
    random = torch.Generator().manual_seed(0)
    groups = [[torch.randn(7, generator=random) for _ in range(9)] for _ in range(2)]
    theirs = [torch.stack(torch._foreach_norm(group[5:])).tolist() for group in groups]
    parts = total_norm([group[:5] for group in groups], Rank(0, 2, answers=[[..., theirs]]))
    assert torch.equal(parts, total_norm(groups, alone := Rank(0, 1)))
    assert alone.said == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_part_that_is_not_finite_is_known_to_all(bad, place):
    mine = [torch.tensor([1.0, bad])] if place == 0 else GRADIENTS
    answers = [..., 0.0] if place == 0 else [1.0, ...]
    comm = Rank(place, 2, answers=[answers])
    skip, bad_here = Part(comm, set()).decide_skip(mine, torch.zeros(()), comm)
    assert (skip, bad_here) == (1, place == 0)
