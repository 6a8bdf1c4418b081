"""The help of every command, and what stands for what."""

import argparse
import re
import shlex

import pytest

from launch.cli import options
from launch.machine.software import read_software
from tests.unit.cli.commands import output
from tests.unit.cli.test_cli import PROGRAM

COMMANDS = next(
    action.choices for action in options.parser()._actions if isinstance(action, argparse._SubParsersAction)
)


def test_alone_it_prints_its_help_with_run_first_and_examples_that_are_right(capsys):
    out = output(capsys)
    assert out == output(capsys, "--help")
    assert re.findall(r"^    (\w+) ", out, re.MULTILINE) == [*COMMANDS]
    assert next(iter(COMMANDS)) == "run"
    examples = re.findall(r"^  hvdlaunch (.*)$", out, re.MULTILINE)
    assert [example.split()[0] for example in examples] == [*COMMANDS]
    for example in examples:
        words = shlex.split(example.partition(" -- ")[0])
        assert options.parser().parse_args(words).command == words[0]
        assert f"hvdlaunch {example}" in " ".join(output(capsys, words[0], "--help").split())


def test_the_version_names_the_code_as_check_does(capsys):
    code = read_software().code
    assert re.fullmatch("[0-9a-f]{12}", code)
    assert re.fullmatch(rf"hvdlaunch \d+\.\d+\.\d+, code {code}\n", output(capsys, "--version"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_with_a_value_says_what_holds_without_it(command):
    given = [action for action in COMMANDS[command]._actions if action.option_strings and action.nargs != 0]
    unsaid = [action.option_strings[0] for action in given if not action.required and "default" not in action.help]
    assert unsaid == [] if command != "hostfile" else ["-H", "--hostfile", "--slurm-nodes"]
    stated = {float: "default: {:g}", int: "default: {}", str: "default: {}"}
    told = [action for action in given if type(action.default) in stated and action.default != "all"]
    wrong = [one.option_strings[0] for one in told if stated[type(one.default)].format(one.default) not in one.help]
    assert wrong == []


def ranks(out):
    """Host and GPU of each rank of a plan."""
    rows = (line.split() for line in out.splitlines())
    return [(row[1], row[3]) for row in rows if len(row) >= 8 and row[0].isdigit() and row[2].isdigit()]


def topologies(**files):
    return [word for host, file in files.items() for word in ("--topology", f"{host}={file}")]


FOUR = [*zip("aaaa", "0213", strict=True)]


@pytest.mark.parametrize(
    ("words", "placed"),
    [
        ("--topology pix4.txt", [("localhost", gpu) for gpu in "0213"]),
        ("-H a,b", [*FOUR, *(("b", gpu) for _, gpu in FOUR)]),
        ("-H a,b -np 5", [*FOUR, ("b", "0")]),
        ("-H a:1,b", [("a", "0"), *(("b", gpu) for _, gpu in FOUR)]),
        ("-H a,b --per-host 2 -np 3", [("a", "0"), ("a", "2"), ("b", "0")]),
        ("-H a:4 --per-host 1", [("a", "0")]),
        ("-H a -np 2 --gpus 1,3,0", [("a", "0"), ("a", "3")]),  # the best two of these
        ("-H c --per-host 3", [("c", "-")] * 3),
        ("-H a --ranks-per-replica 3", [("a", "0"), ("a", "1"), ("a", "2")]),
    ],
)
def test_who_runs_where_without_a_number_of_ranks(capsys, words, placed):
    known = () if "--topology" in words else topologies(a="pix4.txt", b="pix4.txt", c="cpu.json")
    assert ranks(output(capsys, "plan", *words.split(), *known, *PROGRAM)) == placed
