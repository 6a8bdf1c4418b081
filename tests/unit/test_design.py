"""The seams of hvdtrain: what steps, loops and feeds must not know, and how large their pieces may be."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import hvdtrain

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "hvdtrain"
CENTRE = ("core", "loop", "feed")  # what all features share, and what knows none of them
# Whole words, or words of an identifier.
FEATURES = re.compile(
    r"(?<![a-z])(stages?|slic(e|es|ed|ing)|elastic|local[ _]?rounds?|power_?sgd|find[-_ ]?nan|two[-_ ]?level)(?![a-z])",
    re.IGNORECASE,
)
MOST_PARAMETERS = 8
MOST_OF_THE_INTERFACE = {"training": 10}  # Run.training, whose options are named
MOST_LINES = {"examples/own_model.py": 60, "examples/*.py": 90, "hvdtrain/effnet.py": 120, "hvdtrain/bert.py": 120}


def files(*rooms):
    return sorted(path for room in rooms for path in (PACKAGE / room).glob("*.py"))


@cache
def text_of(path):
    return path.read_text()


def place(path, line):
    return f"{path.relative_to(PROJECT)}:{line}"


def features_in(text):
    """The numbers of the lines that name a feature; Python's own `slice` is none."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    named = (one for one in tokens if FEATURES.search(one.string) and one.string != "slice")
    return [one.start[0] for one in named]


def lines_with(pattern, paths):
    lines = ((path, number, line) for path in paths for number, line in enumerate(text_of(path).splitlines(), 1))
    return [place(path, number) for path, number, line in lines if re.search(pattern, line)]


def parameters(function):
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def functions(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, kinds)]


def test_features_are_found_and_other_words_are_not():
    named = [
        "f('--stages 2')",
        "self.is_elastic",
        "PowerSGD(model)",
        "def sliced(self):",
        "local_rounds",
        "# The stage",
    ]
    others = ["places: Sequence[slice]", "'backstage'", "staged", "local_rank", "# two levels"]
    assert [line for line in (*named, *others) if features_in(f"{line}\n")] == named


def test_the_centre_names_no_feature():
    assert [place(path, number) for path in files(*CENTRE) for number in features_in(text_of(path))] == []


def test_the_centre_does_not_branch_on_kinds_of_ranks():
    assert lines_with(r"isinstance\([^)]*(Comm|Sync)\b", files(*CENTRE)) == []


def test_nobody_asks_ranks_which_part_of_a_replica_they_are():
    assert lines_with(r"\bcomm\.part\b", sorted(PACKAGE.rglob("*.py"))) == []


def test_functions_have_few_parameters():
    found = [
        f"{place(path, one.lineno)} {one.name}: {len(parameters(one))}"
        for path in files(*CENTRE, "program")
        for one in functions(path)
        if len(parameters(one)) > MOST_OF_THE_INTERFACE.get(one.name, MOST_PARAMETERS)
    ]
    assert found == []


@pytest.mark.parametrize(("pattern", "most"), MOST_LINES.items())
def test_programs_are_short(pattern, most):
    lengths = {path.name: len(path.read_text().splitlines()) for path in PROJECT.glob(pattern)}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > most} == {}


def test_there_are_twelve_public_names():
    assert len(hvdtrain.__all__) == len(set(hvdtrain.__all__)) <= 12
    for name in hvdtrain.__all__:
        assert getattr(hvdtrain, name).__module__.startswith("hvdtrain.")
    assert not hasattr(hvdtrain, "train")
