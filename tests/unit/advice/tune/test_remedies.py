import sys

import pytest

from launch.advice.tune.remedies import ask_program, parse
from launch.errors import CommandError

GOOD = {"name": "bf16", "options": ["--precision", "bf16"], "what_for": "computation", "same_training": True}


def test_a_document_is_read():
    wire = {"name": "tree", "environment": {"NCCL_ALGO": "Tree"}, "what_for": "communication", "same_training": False}
    found = parse({"remedies": [GOOD, {**wire, "more": 1}], "measure": ["--epochs", "9"], "epochs": 3})
    assert [(one.name, one.same_training) for one in found.remedies] == [("bf16", True), ("tree", False)]
    assert found.remedies[1].environment == (("NCCL_ALGO", "Tree"),)
    assert (found.measure, found.profile, found.epochs) == (("--epochs", "9"), (), 3)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([GOOD], "not an object"),
        ({"remedies": ["--fast"]}, "remedy 1 is"),
        ({"remedies": [GOOD, GOOD]}, "bf16"),
        ({"remedies": [{**GOOD, "name": 1}]}, "name"),
        ({"remedies": [{**GOOD, "options": [1]}]}, "options"),
        ({"remedies": [{**GOOD, "options": []}]}, "changes nothing"),
        ({"remedies": [{**GOOD, "not_with": "tree"}]}, "not_with"),
        ({"remedies": [{**GOOD, "environment": {"A=B": "1"}}]}, "environment"),
        ({"remedies": [{**GOOD, "environment": {"HVDLAUNCH_JOB": "../x"}}]}, "environment"),
        ({"remedies": [], "measure": "--epochs 9"}, "measure"),
        ({"remedies": [], "epochs": 10**400}, "epochs"),
    ],
)
def test_a_document_that_is_none_is_refused(document, problem):
    with pytest.raises(ValueError, match=problem):
        parse(document)


def test_a_program_that_names_none_is_bad_input():
    for program, problem in (("raise SystemExit('--remedies is unknown')", "is unknown"), ("print('[1]')", "remedies")):
        with pytest.raises(CommandError, match=problem):
            ask_program([sys.executable, "-c", program], {})


def test_a_program_is_asked_with_its_own_options():
    echo = f"import json, sys; print(json.dumps({{'remedies': [{GOOD} | {{'options': sys.argv[1:]}}]}}))"
    assert ask_program([sys.executable, "-c", echo, "--lr", "1"], {}).remedies[0].options == ("--lr", "1", "--remedies")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch", r"run\.py has no remedies to tune. Print its remedies"),
        ("from transformers import Trainer", r"hvdtrain\.trainer \S+run\.py --lr 1"),
        ("# its options are in another file, with the remedies", None),
        ("import hvdtrain", None),
    ],
)
def test_a_script_that_never_heard_of_remedies_is_not_started(tmp_path, text, says):
    script, ran = tmp_path / "run.py", tmp_path / "ran"
    script.write_text(f"{text}\n".replace("import", "# import") + f"open({str(ran)!r}, 'w')")
    for before in ([sys.executable], ["torchrun", "-n", "2"] if says else ["env", sys.executable]):
        with pytest.raises(CommandError, match=says or "must print its remedies"):
            ask_program([*before, str(script), "--lr", "1"], {})
        assert ran.exists() == (says is None)
