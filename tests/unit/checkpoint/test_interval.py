"""How often to save, from what saves took."""

import pytest

from hvdtrain.checkpoint.settings import measured_interval
from hvdtrain.settings.command_line import parse, require_rules
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision.settings import RECIPES


def test_the_interval_is_youngs_for_the_median_save_and_no_shorter_than_a_save():
    next_s = measured_interval(ranks=100, failures_per_gpu_hour=0.01)  # a failure an hour
    assert next_s(2.0) == pytest.approx((2 * 2.0 * 3600) ** 0.5)
    assert next_s(200.0) > next_s(2.0) == pytest.approx((2 * 2.0 * 3600) ** 0.5)
    assert measured_interval(ranks=1, failures_per_gpu_hour=3600.0)(60.0) == 60.0


def test_the_rate_of_failures_is_no_option_and_the_line_names_its_replacement():
    with pytest.raises(BadInput, match=r"--failures-per-gpu-hour 0\.1: not an option.* --checkpoint-every-s SECONDS"):
        parse(["--failures-per-gpu-hour", "0.1"], RECIPES, prog="x")


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("12.5", 12.5), ("often", None), ("-1", None)])
def test_only_auto_and_numbers_are_intervals(word, value):
    def parsed():
        settings, _ = parse([f"--checkpoint-every-s={word}"], RECIPES, prog="program")
        require_rules(settings)
        return settings.checkpoint_every_s

    if value is None:
        with pytest.raises(BadInput, match="--checkpoint-every-s"):
            parsed()
    else:
        assert parsed() == value
