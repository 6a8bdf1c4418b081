"""Every option that a refusal proposes is itself taken, and all that is missing is proposed at once."""

import itertools
import re
from functools import partial

import pytest

from hvdtrain.settings.group import Incomplete
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from tests.refusals import options_refused_together

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
            ([texts.parse], "--recipe finetune --columns a,b,c"),
            ([texts.parse], "--recipe finetune --data text --stages 2"),
            ([texts.parse], "--columns t,l"),
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


def test_what_does_not_go_together_is_said_before_what_is_missing():
    attempt = partial(images.parse, ["--stages", "2", "--profile=timeline"])
    assert options_refused_together(attempt) == {"--stages 2", "--profile timeline"}
