"""The help of every command, and what stands for what."""

import argparse
import re
import shlex

import pytest

from launch.cli import options
from launch.machine.software import read_software
from tests.unit.cli.commands import output

COMMANDS = next(one.choices for one in options.parser()._actions if isinstance(one, argparse._SubParsersAction))


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
