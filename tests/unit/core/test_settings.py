import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.vision.settings import parse


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--global-batch-size", "512", "--batch-size-per-rank=128"],
            "--global-batch-size 512 and --batch-size-per-rank 128 ",
        ),
        (["--batch-size-per-rank", "auto"], "--batch-size-per-rank auto requires --global-batch-size"),
    ],
)
def test_the_batch_is_set_once(words, line):
    with pytest.raises(BadInput) as error:
        parse(words)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
