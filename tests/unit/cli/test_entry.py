"""hvdlaunch as a process, from its first module on, and the help of every command."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launch.cli import options
from launch.machine.software import read_software
from tests.unit.cli.commands import output

PROJECT = Path(__file__).parents[3]
COMMAND = tomllib.loads((PROJECT / "packaging/hvdlaunch/pyproject.toml").read_text())["project"]["scripts"]["hvdlaunch"]

INTERRUPTED = f"""
import importlib.machinery, os, signal, sys

class Interrupting(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, *_):
        if name == interrupted:
            class Within:
                def __set_name__(self, *_):
                    os.kill(os.getpid(), signal.SIGINT)

            type("Any", (), {{"attribute": Within()}})  # as dataclasses and enums have them

interrupted = sys.argv.pop(1)
module, _, main = "{COMMAND}".partition(":")
entry = getattr(__import__(module, fromlist=[main]), main)
sys.meta_path.insert(0, Interrupting)
entry()
"""


def process(tmp_path, code, *words, **options):
    start, environment = [sys.executable, "-c", code, *words], {"PYTHONPATH": str(PROJECT)}
    return subprocess.run(start, cwd=tmp_path, env=environment, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("module", ["launch.cli.main", "launch.cli.show"])
def test_control_c_while_modules_are_imported_ends_it_in_silence(tmp_path, module):
    done = process(tmp_path, INTERRUPTED, module, "topo", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


INHERITED = """
import subprocess, sys
from launch.cli.main import _open_standard_files

_open_standard_files()
child = "import os; [os.fstat(number) for number in (0, 1, 2)]"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def test_what_the_caller_has_closed_is_open_in_the_launcher_too(tmp_path):
    assert process(tmp_path, INHERITED, preexec_fn=lambda: os.closerange(0, 3)).returncode == 0


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
    assert unsaid == [] if command != "hostfile" else ["-H", "--hostfile"]
    stated = {float: "default: {:g}", int: "default: {}", str: "default: {}"}
    told = [action for action in given if type(action.default) in stated and action.default != "all"]
    wrong = [one.option_strings[0] for one in told if stated[type(one.default)].format(one.default) not in one.help]
    assert wrong == []
