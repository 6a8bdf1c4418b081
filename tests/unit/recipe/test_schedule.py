import math
from dataclasses import replace

import pytest

from hvdtrain.recipe.schedule import LearningRate, learning_rate, scaled_lr
from hvdtrain.recipe.settings import OPTIMIZERS
from hvdtrain.tasks.vision import settings as images

BATCH = 100.0


def cosine(**changes):
    """The rate of a step with a batch of the usual size."""
    settings = {"peak": 0.4, "batch": BATCH, "scaling": "linear", "warmup_steps": 4, "total_steps": 12}
    lr = LearningRate(**{**settings, "shape": "cosine", **changes})
    return lambda step: lr(step, BATCH)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 0.1),  # a quarter of the peak: never zero, which would waste the step
        (1, 0.2),
        (3, 0.4),  # warm-up ends at the peak
        (4, 0.4),
        (8, 0.2),  # half way down
        (11, 0.2 * (1 + math.cos(math.pi * 7 / 8))),
        (3.5, 0.4),  # between two steps, after batches of another size: never above the peak
    ],
)
def test_warms_up_linearly_and_falls_as_a_cosine(step, lr):
    assert cosine()(step) == pytest.approx(lr)


@pytest.mark.parametrize(("shape", "rates"), [("constant", [0.4, 0.4, 0.4, 0.4]), ("linear", [0.4, 0.4, 0.2, 0.05])])
def test_the_peak_stays_or_falls_as_a_line(shape, rates):
    assert [cosine(shape=shape)(step) for step in (3, 4, 8, 11)] == pytest.approx(rates)
    assert cosine(shape=shape)(0) == pytest.approx(0.1)
    assert cosine(shape=shape, warmup_steps=0)(0) == 0.4


@pytest.mark.parametrize(
    ("optimizer", "global_batch", "expected"),
    [
        ("sgd", 1024, 0.4),
        ("rmsprop", 1024, 0.4),
        ("adam", 1024, 0.2),
        ("adamw", 64, 0.05),
        ("lars", 64, 0.025),
        ("lamb", 1024, 0.2),
    ],
)
def test_scaled_lr_is_linear_for_sgd_and_lars_and_square_root_for_adam_and_lamb(optimizer, global_batch, expected):
    scaling = OPTIMIZERS[optimizer].scaling
    assert scaled_lr(0.1, scaling=scaling, batch=global_batch) == pytest.approx(expected)


# --- a batch of another size


@pytest.mark.parametrize(
    ("scaling", "samples", "expected"),
    [("linear", 2, 0.008), ("linear", 101, 0.404), ("sqrt", 25, 0.2), (None, 2, 0.4)],
)
def test_the_rate_follows_the_batch_at_hand(scaling, samples, expected):
    """What is left of an epoch that goes on with another batch may be a batch of 2."""
    lr = LearningRate(peak=0.4, batch=BATCH, scaling=scaling, warmup_steps=0, total_steps=10, shape="constant")
    assert lr(3, samples) == pytest.approx(expected)


# --- that of a run


def test_the_peak_is_that_of_the_batches_that_are_taken_not_of_the_largest_that_are_allowed():
    lr = learning_rate(images.scaled(), samples=1438, steps_per_epoch=5)  # of at most 359
    assert lr.peak == pytest.approx(0.1 * 287.6 / 256)
    assert (lr.batch, lr.scaling, lr.warmup_steps, lr.total_steps, lr.shape) == (287.6, "linear", 25, 125, "cosine")
    given = replace(images.scaled(), lr=0.02, optimizer="adamw")
    assert learning_rate(given, samples=5 * 1024, steps_per_epoch=5).peak == pytest.approx(0.04)


def test_book_recipe_has_one_rate_whatever_the_global_batch():
    lr = learning_rate(images.book(), samples=10 * 4096, steps_per_epoch=10)
    assert {lr(step, samples) for step in range(250) for samples in (1, 4096)} == {1e-4}


def test_a_run_of_so_many_steps_warms_up_and_falls_within_them():
    settings = replace(images.scaled(), epochs=3, warmup_epochs=1.0)
    rates = [learning_rate(settings, samples=100, steps_per_epoch=10, max_steps=steps) for steps in (25, 12, 1)]
    assert [(lr.warmup_steps, lr.total_steps) for lr in rates] == [(10, 25), (6, 12), (0, 1)]
