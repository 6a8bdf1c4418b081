"""The seams of hvdtrain: the shape of a step and its slots, what the centre must not know, and how large pieces are."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hvdtrain
from tests.unit.test_imports import imports_of

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "hvdtrain"
CENTRE = ("core", "loop", "loop/feed")  # what all features share, and what knows none of them
SLOTS = ("GradientSync", "Layout", "Whole", "EveryStep")
MOST_PARAMETERS = 8
MOST_OF_THE_INTERFACE = {"training": 10}  # Run.training, whose options are named
MOST_OPTIONS = {"hvdtrain.effnet --help-all": 46, "hvdtrain.bert --help-all": 50, "launch run --help": 26}
MOST_LINES = {"examples/own_model.py": 60, "examples/*.py": 90, "hvdtrain/effnet.py": 120, "hvdtrain/bert.py": 120}
ORDER = ["train", "finish", "unscale_", "_decide", "decided", "_clip", "_step_unless", "explain", "update", "follow"]


def files(*rooms):
    return sorted(path for room in rooms for path in (PACKAGE / room).glob("*.py"))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def place(path, line):
    return f"{path.relative_to(PROJECT)}:{line}"


def nodes(kind, paths):
    return [(path, node) for path in paths for node in ast.walk(tree_of(path)) if isinstance(node, kind)]


@cache
def classes():
    """The file and the definition of each class; of equal names, that of the first room."""
    return {node.name: (path, node) for path, node in nodes(ast.ClassDef, sorted(PACKAGE.rglob("*.py"), reverse=True))}


def fillings(slot):
    """The names of the classes that fill a slot, and of those that they come from."""
    found = [slot]
    for name in found:
        found += [one for one, (_, node) in classes().items() if name in map(ast.unparse, node.bases)]
    return found


def methods(name):
    return {one.name: one for one in classes()[name][1].body if isinstance(one, ast.FunctionDef)}


def public(name):
    return {method for method in methods(name) if not method.startswith("_")}


def test_a_step_is_one_function_in_the_order_of_what_happens():
    call = methods("Step")["__call__"]
    assert call.end_lineno - call.lineno < 50
    calls = sorted((one for one in ast.walk(call) if isinstance(one, ast.Call)), key=lambda one: one.lineno)
    names = [one.func.attr for one in calls if isinstance(one.func, ast.Attribute)]
    assert [name for name in names if name in ORDER] == ORDER


@pytest.mark.parametrize("name", ["Step", "Layout", "Whole", "EveryStep"])
def test_nothing_of_one_call_is_left_in_an_object(name):
    assigned = [
        (method, node.attr)
        for method, function in methods(name).items()
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    ]
    assert {method for method, _ in assigned} <= {"__init__", "__post_init__"}


@pytest.mark.parametrize("slot", SLOTS)
def test_what_fills_a_slot_is_called_by_a_step_and_knows_none(slot):
    for name in fillings(slot):
        assert not {"hvdtrain.core.step", "hvdtrain.core.pending"} & {*imports_of(classes()[name][0])}, name


@pytest.mark.parametrize("slot", ["Layout", "Whole", "EveryStep"])
def test_what_fills_a_slot_has_no_method_that_the_slot_has_not(slot):
    assert {name: public(name) - public(slot) for name in fillings(slot) if public(name) - public(slot)} == {}


def test_what_every_layout_does_is_little_and_apart_from_the_parts_of_a_replica():
    assert len(public("Layout")) <= 6
    assert not public("Layout") & public("Whole")
    assert len(classes()["Forward"][1].body) <= 1 + 7  # what a layout needs of a step, and a docstring


def test_the_centre_asks_no_object_what_it_is():
    asked = [
        place(path, node.lineno)
        for path, node in nodes(ast.Call, files(*CENTRE))
        if ast.unparse(node.func) in ("isinstance", "issubclass")
        and classes().keys() & {*re.findall(r"\w+", ast.unparse(node.args[1]))}
    ]
    assert asked == []


def parameters(function):
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_functions_have_few_parameters():
    found = [
        f"{place(path, one.lineno)} {one.name}: {len(parameters(one))}"
        for path, one in nodes(ast.FunctionDef, files(*CENTRE, "program"))
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


@pytest.mark.parametrize(("command", "most"), MOST_OPTIONS.items())
def test_a_new_option_replaces_one(command, most):
    shown = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True, check=True).stdout
    assert 20 < len(re.findall(r"^  --?(?!h,)", shown, re.MULTILINE)) <= most
