"""How often to save, from what saves took."""

import pytest

from hvdtrain.checkpoint.settings import measured_interval
from hvdtrain.settings.command_line import parse
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision.settings import RECIPES
from tests.refusals import refused, require_facts


def test_the_interval_is_youngs_for_the_median_save_and_no_shorter_than_a_save():
    next_s = measured_interval(ranks=100, failures_per_gpu_hour=0.01)  # a failure an hour
    assert next_s(2.0) == pytest.approx((2 * 2.0 * 3600) ** 0.5)
    assert next_s(200.0) > next_s(2.0) == pytest.approx((2 * 2.0 * 3600) ** 0.5)
    assert measured_interval(ranks=1, failures_per_gpu_hour=3600.0)(60.0) == 60.0


def test_the_rate_of_failures_is_no_option_and_the_line_names_its_replacement():
    with pytest.raises(BadInput, match=r"--failures-per-gpu-hour 0\.1: not an option.* --checkpoint-every 60s"):
        parse(["--failures-per-gpu-hour", "0.1"], RECIPES, prog="x")


@pytest.mark.parametrize(
    ("word", "every_s", "every_steps"),
    [("auto", 60.0, None), ("12.5s", 12.5, None), ("0s", 0.0, None), ("100steps", 0.0, 100)],
)
def test_an_interval_is_of_seconds_or_of_steps(word, every_s, every_steps):
    settings, _ = parse([f"--checkpoint-every={word}"], RECIPES, prog="program")
    assert (settings.checkpoint_every_s, settings.checkpoint_every_steps) == (every_s, every_steps)


@pytest.mark.parametrize("word", ["often", "60", "-1s", "0steps", "infs", "60s,100steps", "1.5steps"])
def test_another_interval_is_one_line_with_the_forms(word):
    require_facts(
        refused(lambda: parse([f"--checkpoint-every={word}"], RECIPES, prog="program")),
        f"--checkpoint-every {word}: must be auto ... 60s ... 100steps. 0s turns it off",
    )
