from functools import partial

import pytest

from hvdtrain.vision.settings import parse
from tests.refusals import options_refused_together


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_layerwise_optimizers_are_refused_with_fp16(optimizer):
    attempt = partial(parse, ["--optimizer", optimizer, "--precision", "fp16"])
    assert options_refused_together(attempt) == {f"--optimizer {optimizer}", "--precision fp16"}
    for precision in ("bf16", "fp32"):
        assert parse(["--optimizer", optimizer, "--precision", precision]).optimizer == optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adam", "adamw"])
def test_other_optimizers_take_fp16(optimizer):
    assert parse(["--optimizer", optimizer, "--precision", "fp16"]).precision == "fp16"
