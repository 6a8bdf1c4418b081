"""What --dry-run and its options refuse."""

import pytest

from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from tests.refusals import refused, require_facts


@pytest.mark.parametrize(
    ("program", "words", "facts"),
    [
        (images, "--dry-run json,p100", "--dry-run json,p100: ... v100, a100, h100, h200"),
        (images, "--dry-run=", "--dry-run '': unknown"),
        (images, "--dry-run a100,v100 --precision bf16", "--dry-run v100: has no bf16"),
        (images, "--dry-run --stages 2 --accumulate-steps 2", "--stages 2"),
        (images, "--dry-run --compile", "--compile"),
        (texts, "--dry-run --tensor 2", "--tensor 2"),
        (texts, "--dry-run --pretrained somebody/bert", "downloads nothing"),
    ],
)
def test_what_it_refuses(program, words, facts):
    require_facts(refused(lambda: program.parse(words.split())), facts)


def test_sizes_of_a_model_on_the_hub_are_known_without_it():
    found = texts.parse(["--dry-run", "--recipe", "finetune", "--pretrained", "bert-large-cased"])
    assert (found.pretrained, found.model, found.vocab_size) == (None, "bert_large", 28_996)
