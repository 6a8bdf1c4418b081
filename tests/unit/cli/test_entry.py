"""hvdlaunch as a process, from its first module on."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
