"""Every option that a refusal proposes is itself taken, and all that is missing is proposed at once."""

import itertools
import re

import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.command_line import Incomplete
from hvdtrain.text import config as texts
from hvdtrain.vision import config as images
from tests.refusals import refused

BOTH = [images.parse, texts.parse]


def proposed(line):
    """The words of each choice that a line of what is missing leaves."""
    clauses = [clause.partition(" requires ")[2] for clause in re.sub(r" \([^)]*\)", "", line).split("; ")]
    for choice in itertools.product(*(clause.replace(", or --", "|--").split("|") for clause in clauses)):
        found = re.findall(r"--[a-z-]+(?: (?!--|and)[\w@-]+)?", " ".join(choice))
        yield " ".join(found).split()


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        (parse, words)
        for parses, words in [
            (BOTH, "--stages 5"),
            (BOTH, "--stages-at 3,5 --pipeline-schedule gpipe"),
            (BOTH, "--pipeline-schedule gpipe --accumulate-steps 1"),
            (BOTH, "--sync-group-size 2"),
            (BOTH, "--sync-group-size 2 --sync-every 4"),
            (BOTH, "--sync local"),
            (BOTH, "--sync two-level --sync-every 4"),
            (BOTH, "--fusion-groups 3 --sync-every 4"),
            (BOTH, "--min-np 2 --grow --seed 3"),
            (BOTH, "--stages 5 --fusion-groups 3"),
            ([texts.parse], "--recipe finetune --pair-column p"),
            ([texts.parse], "--recipe finetune --data text --stages 2"),
            ([texts.parse], "--text-column t --label-column l"),
            ([texts.parse], "--data text"),
        ]
        for parse in parses
    ],
)
def test_what_is_missing_is_proposed_at_once_and_taken(parse, words):
    with pytest.raises(Incomplete) as error:
        parse(words.split())
    assert "\n" not in str(error.value)
    choices = list(proposed(str(error.value)))
    assert all(choices)
    for more in choices:
        parse([*words.split(), *more])


@pytest.mark.parametrize(
    ("parse", "words", "remedy", "mended"),
    [
        (images.parse, "--optimizer lamb --precision fp16", "use bf16 or fp32", "--optimizer lamb --precision bf16"),
        (images.parse, "--optimizer best", "choose one of sgd", "--optimizer sgd"),
        (images.parse, "--compression zip", "as powersgd:2", "--compression powersgd:2"),
        (images.parse, "--global-batch-size 8 --batch-size-per-rank 8", "give one of them", "--global-batch-size 8"),
        (images.parse, "--compile --recompute", "leave one of them out", "--recompute"),
        (images.parse, "--sync local --sync-every x", "--sync-every 16", "--sync local --sync-every 16"),
        (images.parse, "--sync local --sync-every x", "or 16@5", "--sync local --sync-every 16@5"),
        (images.parse, "--stages 2 --compile", "--compile does not work with", "--stages 2 --accumulate-steps 2"),
        (images.parse, "--elastic --timeline", "--timeline does not work with --elastic", "--elastic"),
        (texts.parse, "--tensor 2 --optimizer lamb", "give adamw", "--tensor 2 --optimizer adamw"),
        (texts.parse, "--tensor 2 --stages 2", "leave one of them out", "--tensor 2"),
        (texts.parse, "--max-tokens 7", "give at least 8", "--max-tokens 8"),
        (texts.parse, "--task mlm --data csv --label-column l", "leave it out", "--task mlm --data csv"),
        (texts.parse, "--recipe finetune --model bert_base", "--recipe finetune and --model bert_base", ""),
        (texts.parse, "--epochs 3 --max-steps 5", "leave one of them out", "--max-steps 5"),
    ],
)
def test_what_does_not_go_together_is_taken_as_the_refusal_says(parse, words, remedy, mended):
    line = refused(lambda: parse(words.split()))
    assert remedy in line
    parse(mended.split())


def test_what_does_not_go_together_is_said_before_what_is_missing():
    with pytest.raises(BadInput, match=r"^--sync-bn does not work with --stages 2"):
        images.parse(["--stages", "2", "--sync-bn"])


@pytest.mark.parametrize(
    ("words", "conflict"),
    [
        ("--fusion-groups 3 --grow", "--reducer horovod does not work with --elastic"),
        ("--stages-at 3 --sync-every 4", "--sync local does not work with --stages 2"),
        ("--sync-group-size 2 --compression powersgd:2", "--sync two-level does not work with --compression powersgd"),
        ("--sync-bn --sync-every 16", "--sync-bn asks all ranks at every layer"),
        ("--sync-bn --stages-at 4", "--sync-bn does not work with --stages 2"),
        ("--tensor 2 --stages-at 1", "--tensor 2 does not work with --stages 2"),
        ("--freeze-embeddings --stages-at 1", "--freeze-embeddings does not work with --stages 2"),
    ],
)
def test_nothing_is_proposed_that_would_be_refused_together(words, conflict):
    parse = texts.parse if {"--tensor", "--freeze-embeddings"} & {*words.split()} else images.parse
    line = refused(lambda: parse(words.split()))
    assert f"; but {conflict}" in line
