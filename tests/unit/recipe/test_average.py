"""What a run remembers of its own past, for which a short one must not wait."""

import pytest
import torch
from torch import nn

from hvdtrain.recipe.average import average_of_run, limit_statistics
from hvdtrain.tasks.vision import settings as vision_settings


def limited(passes, momentum=0.1):
    model = nn.Sequential(nn.BatchNorm2d(2, momentum=momentum), nn.BatchNorm2d(2, momentum=None))
    limit_statistics(model, passes=passes)
    assert model[1].momentum is None  # the mean of all passes
    return model[0].momentum


@pytest.mark.parametrize(
    ("passes", "momentum", "expected"),
    [(1000, 0.1, 0.1), (50, 0.1, 0.2), (5, 0.1, 1.0), (625, 0.01, 0.016)],
)
def test_running_statistics_remember_a_tenth_of_the_run_at_most(passes, momentum, expected):
    assert limited(passes, momentum) == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "memory"), [(575, 46.0), (92, 9.2)])
def test_the_moving_average_remembers_a_tenth_of_the_run_at_most(steps, memory):
    model = nn.Linear(1, 1)
    average = average_of_run(model, vision_settings.scaled(), steps_per_epoch=23, steps=steps)  # of two epochs
    average.n_averaged.fill_(1_000_000)
    with torch.no_grad():
        model.weight.copy_(average.module.weight + 1)
    before = average.module.weight.item()
    average.follow(torch.tensor(0.0))
    assert average.module.weight.item() - before == pytest.approx(1 / memory, rel=1e-4)
