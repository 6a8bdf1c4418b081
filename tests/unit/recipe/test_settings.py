import pytest

from hvdtrain.vision.settings import parse


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adam", "adamw", "lars", "lamb"])
def test_all_optimizers_take_fp16(optimizer):
    assert parse(["--optimizer", optimizer, "--precision", "fp16"]).precision == "fp16"
