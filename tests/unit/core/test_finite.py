import math

import numpy as np
import pytest
import torch

from hvdtrain.core.finite import Spike, SpikeWatch, total_norm
from hvdtrain.core.parts import Part
from tests.ranks import Rank

# --- spikes


def noise(count):
    return np.random.default_rng(0).normal(size=count)


def spikes_of(losses, rank=0):
    watch = SpikeWatch(rank)
    return [spike for step, loss in enumerate(losses, start=1) if (spike := watch.see(step, loss))]


def test_the_eleventh_loss_is_the_first_that_may_be_a_spike():
    assert spikes_of([1.0] * 9 + [1e6]) == []
    assert spikes_of([1.0] * 10 + [100.0], rank=3) == [Spike(step=11, rank=3, loss=100.0, usual=1.0)]


def test_noise_a_slow_rise_and_any_fall_are_no_spikes():
    rise = 1.0 + np.arange(800) / 200 + 0.02 * noise(800)
    for losses in (2.0 + 0.3 * noise(1000), rise, rise[::-1], [2.0] * 60 + [0.001] + [2.0] * 5):
        assert spikes_of(losses) == []


@pytest.mark.parametrize(
    ("usual", "loss", "found"),
    [
        (2.0, 2.9, 0),  # after constant losses, half of them
        (2.0, 3.1, 1),
        (-2.0, -1.1, 0),
        (-2.0, -0.9, 1),
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
