"""What a run remembers of its own past, for which a short one must not wait."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hvdtrain.recipe.average import average_of_run, limit_statistics
from hvdtrain.tasks.vision import settings as vision_settings


def momenta(epochs, steps_per_epoch, *, momentum=0.1, accumulate_steps=1):
    model = nn.Sequential(nn.BatchNorm2d(2, momentum=momentum), nn.BatchNorm2d(2, momentum=None))
    settings = replace(vision_settings.scaled(), epochs=epochs, accumulate_steps=accumulate_steps)
    limit_statistics(model, settings, steps_per_epoch=steps_per_epoch)
    assert model[1].momentum is None  # the mean of all passes
    return model[0].momentum


@pytest.mark.parametrize(
    ("steps", "momentum", "expected"),
    [(1000, 0.1, 0.1), (50, 0.1, 0.2), (5, 0.1, 1.0), (625, 0.01, 0.016)],
)
def test_running_statistics_remember_a_tenth_of_the_run_at_most(steps, momentum, expected):
    assert momenta(1, steps, momentum=momentum) == pytest.approx(expected)
    assert momenta(steps, 1, momentum=momentum) == pytest.approx(expected)


def test_with_accumulation_they_remember_forward_passes():
    assert momenta(1, 12, accumulate_steps=5) == pytest.approx(1 / 6)


@pytest.mark.parametrize(("epochs", "ema_epochs", "memory"), [(25, 2.0, 46.0), (4, 2.0, 9.2)])
def test_the_moving_average_remembers_a_tenth_of_the_run_at_most(epochs, ema_epochs, memory):
    model = nn.Linear(1, 1)
    settings = replace(vision_settings.scaled(), epochs=epochs, ema_epochs=ema_epochs)
    average = average_of_run(model, settings, steps_per_epoch=23)
    average.n_averaged.fill_(1_000_000)
    with torch.no_grad():
        model.weight.copy_(average.module.weight + 1)
    before = average.module.weight.item()
    average.follow(torch.tensor(0.0))
    assert average.module.weight.item() - before == pytest.approx(1 / memory, rel=1e-4)
