"""How often to save, from what saves took."""

import pytest

from hvdtrain.checkpoint.interval import MeasuredInterval
from hvdtrain.checkpoint.settings import CheckpointSettings
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.command_line import parse, require_rules
from hvdtrain.vision.settings import RECIPES


def test_the_interval_is_youngs_for_the_median_save():
    interval = MeasuredInterval(ranks=100, failures_per_gpu_hour=0.01)  # a failure an hour
    assert interval.after(2.0) == pytest.approx((2 * 2.0 * 3600) ** 0.5)
    assert interval.after(200.0) > interval.after(2.0) == pytest.approx((2 * 2.0 * 3600) ** 0.5)


def test_a_save_that_takes_longer_than_a_job_lives_is_not_followed_by_the_next():
    assert MeasuredInterval(ranks=1, failures_per_gpu_hour=3600.0).after(60.0) == 60.0


def test_a_rate_without_auto_is_refused():
    with pytest.raises(BadInput, match="requires --checkpoint-every-s auto"):
        CheckpointSettings(failures_per_gpu_hour=0.1).check({"failures_per_gpu_hour"})
    CheckpointSettings(failures_per_gpu_hour=0.1, checkpoint_every_s="auto").check({"failures_per_gpu_hour"})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_only_auto_and_numbers_are_intervals(value):
    require_rules(CheckpointSettings(checkpoint_every_s="auto"))
    with pytest.raises(BadInput, match="--checkpoint-every-s"):
        require_rules(CheckpointSettings(checkpoint_every_s=value))


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("12.5", 12.5)])
def test_the_command_line_takes_a_number_or_auto(word, value):
    settings, _ = parse(["--checkpoint-every-s", word], RECIPES, prog="program")
    assert settings.checkpoint_every_s == value


def test_another_word_is_no_interval():
    with pytest.raises(BadInput, match=r"--checkpoint-every-s.*'often'"):
        parse(["--checkpoint-every-s", "often"], RECIPES, prog="program")
