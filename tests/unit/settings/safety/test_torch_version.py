"""A torch that was not tested: an older one ends a program, others get a line."""

import os
import re
import sys
from pathlib import Path

import pytest

from hvdtrain.program.join import join_ranks
from hvdtrain.settings.safety import torch_version
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision import settings
from tests.setup.commands import run

PROJECT = Path(__file__).parents[4]


@pytest.mark.parametrize("version", ["2.7.1", "2.11.0+cu130", "2.14.1"])
def test_those_of_the_locks_are_tested(monkeypatch, version):
    monkeypatch.setattr(torch_version, "version", lambda _: version)
    assert torch_version.require_tested() is None
    pins = [re.findall(r"^torch==(\d+)\.(\d+)", file.read_text(), re.M) for file in PROJECT.glob("requirements/*.in")]
    assert {(int(major), int(minor)) for [(major, minor)] in pins} == set(torch_version.TESTED)


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0a0+git1a2b", "3.0.1"])
def test_another_one_is_noted(monkeypatch, version):
    monkeypatch.setattr(torch_version, "version", lambda _: version)
    assert torch_version.require_tested() == f"torch {version} was not tested. Tested: 2.7, 2.11, 2.14."


def test_an_older_one_is_rejected(monkeypatch):
    monkeypatch.setattr(torch_version, "version", lambda _: "2.6.0+cu124")
    with pytest.raises(BadInput, match=r"^torch 2\.6\.0\+cu124: older than all .*\(2\.7, 2\.11, 2\.14\)\. Install"):
        torch_version.require_tested()


@pytest.mark.parametrize(
    ("module", "installed", "status", "line"),
    [
        ("hvdtrain", "2.5.1", 2, "error: torch 2.5.1: older than all"),
        ("hvdtrain.effnet", "2.5.1", 2, "error: torch 2.5.1: older than all"),
        pytest.param("hvdtrain.bandwidth", "2.5.1", 2, "error: torch 2.5.1: older than all", marks=pytest.mark.slow),
        ("hvdtrain", "2.99.0", 0, "note: torch 2.99.0 was not tested."),
    ],
)
def test_a_program_prints_one_line(tmp_path, *, module, installed, status, line):
    facts = tmp_path / f"torch-{installed}.dist-info"  # before the records of the real one
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PROJECT}"}
    done = run([sys.executable, "-m", module], env=env, cwd=tmp_path)
    assert done.returncode == status
    [printed] = done.stderr.splitlines()
    assert printed.startswith(f"hvdtrain: {line}")


def test_the_ranks_note_it_once(monkeypatch, capsys):
    monkeypatch.setattr(torch_version, "version", lambda _: "2.99.0")
    monkeypatch.setattr(sys, "argv", ["it"])
    monkeypatch.setattr(os, "environ", {**os.environ})  # which join_ranks changes
    join_ranks(settings.parse, settings.scaled())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdtrain: note: torch 2.99.0 was not tested.")
