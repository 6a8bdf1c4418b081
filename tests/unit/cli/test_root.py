"""hvdlaunch as root: the ranks start, and one note names it outside a container."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from launch.cli import main as cli
from launch.cli import start
from tests.unit.cli.commands import ended, output

NOTE = "hvdlaunch: note: the ranks run as root (mpirun --allow-run-as-root)\n"
TRAIN = ("--", "python", "train.py")
NO_MPI = "hvdlaunch: error: no mpirun on PATH"


@pytest.fixture(autouse=True)
def root(monkeypatch, tmp_path):
    """This user is root; the folder in which files of containers are looked for."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(start, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [("run", "--restarts", "1"), ("sweep",), ("check", "--bandwidth")])
def test_what_starts_ranks_notes_it_once(capsys, words):
    program = () if words[0] == "check" else ("-np", "2", *TRAIN)
    status, _, err = ended(capsys, *words, *program)
    assert status
    assert err.startswith(NOTE)
    assert err.count("root") == NOTE.count("root")


def test_a_run_notes_it_once_it_is_known_to_start(capsys, monkeypatch):
    assert ended(capsys, "run", "-np", "2", *TRAIN)[2].startswith(NO_MPI)
    prepared = SimpleNamespace(plan=SimpleNamespace(remarks=()))
    monkeypatch.setattr(start.prepare, "prepare", lambda *_: prepared)
    monkeypatch.setattr(start.watched, "run", lambda *_, **__: SimpleNamespace(status=0))
    monkeypatch.setattr(start, "journal", Mock(alone=nullcontext))
    monkeypatch.setattr(start, "require_notices", Mock())
    assert ended(capsys, "run", "-np", "2", *TRAIN) == (0, "", NOTE)


@pytest.mark.parametrize("sign", [".dockerenv", "run/.containerenv", "APPTAINER_CONTAINER", "KUBERNETES_SERVICE_HOST"])
def test_a_container_needs_no_note(capsys, root, monkeypatch, sign):
    if sign.isupper():
        monkeypatch.setitem(os.environ, sign, "x")
    else:
        (root / sign).parent.mkdir(exist_ok=True)
        (root / sign).touch()
    assert ended(capsys, "run", "-np", "2", *TRAIN)[2].startswith(NO_MPI)


def test_the_option_is_accepted_without_a_note_and_hidden(capsys):
    assert ended(capsys, "run", "-np", "2", "--allow-run-as-root", *TRAIN)[2].startswith(NO_MPI)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", "--help"])
    assert "--allow-run-as-root" not in capsys.readouterr().out


@pytest.mark.parametrize("user", [0, 1000])
def test_mpirun_gets_its_option_as_root_only(capsys, monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    shown = output(capsys, "plan", "-np", "2", "--topology", "pix4.txt", *TRAIN)
    assert ("--allow-run-as-root" in shown) == (user == 0)


def test_a_written_job_decides_where_it_runs(capsys):
    assert ended(capsys, "run", "-np", "2", "--batch", "job", *TRAIN) == (0, "submit it with: sbatch job\n", "")
    assert "--allow-run-as-root" not in Path("job").read_text()
