import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.vision.settings import parse


@pytest.mark.parametrize("recipe", ["scaled", "book"])
@pytest.mark.parametrize("given", [128, 256])
def test_two_batch_sizes_are_one_too_many(recipe, given):
    with pytest.raises(BadInput) as error:
        parse(["--recipe", recipe, "--global-batch-size", "512", f"--batch-size-per-rank={given}"])
    message = str(error.value)
    assert "\n" not in message
    assert "--global-batch-size 512" in message
    assert f"--batch-size-per-rank {given}" in message
