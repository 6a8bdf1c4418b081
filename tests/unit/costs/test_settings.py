"""What --dry-run and its options refuse."""

import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.text import settings as texts
from hvdtrain.vision import settings as images


def refusal(words, program=images):
    with pytest.raises(BadInput) as refused:
        program.parse(words.split())
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("words", ["--device a100", "--json", "--device v100 --json"])
def test_its_options_require_it(words):
    assert "requires --dry-run" in refusal(words)


def test_an_unknown_device_is_refused_with_those_that_there_are():
    assert "v100, a100, h100, h200" in refusal("--dry-run --device p100")


def test_a_device_without_bf16_is_refused():
    assert "--device v100" in refusal("--dry-run --device v100 --precision bf16")
    assert images.parse(["--dry-run", "--device", "a100", "--precision", "bf16"]).device == "a100"


@pytest.mark.parametrize("words", ["--stages 2 --accumulate-steps 2", "--compile"])
def test_what_it_cannot_count_is_refused(words):
    assert "--dry-run" in refusal(f"--dry-run {words}")


def test_parts_of_layers_are_refused():
    assert "--tensor 2" in refusal("--dry-run --tensor 2", texts)


def test_sizes_of_a_model_on_the_hub_are_known_without_it():
    found = texts.parse(["--dry-run", "--recipe", "finetune", "--pretrained", "bert-large-cased"])
    assert (found.pretrained, found.model, found.vocab_size) == (None, "bert_large", 28_996)
    assert "downloads nothing" in refusal("--dry-run --pretrained somebody/bert", texts)
