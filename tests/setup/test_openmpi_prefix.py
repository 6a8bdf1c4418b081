"""MPI without a launcher, in the environment of scripts/setup.sh and in one that was moved."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# mpirun of a different MPI, which would take OPAL_PREFIX for its own.
FOREIGN = "#!/bin/sh\nenv | grep -E '^(OPAL|PMIX|PMIX_INSTALL)_PREFIX=' && exit 1\nexit 0\n"
# As MPI's own modules do: mpi4py's starts MPI when it is imported, unless rc says otherwise.
MPI4PY = """
import os
import mpi4py
seen = []
def Init():
    seen.append(os.environ.get("OPAL_PREFIX"))
    os.putenv("PMIX_INSTALL_PREFIX", "of the library")
Init_thread = Init
def Is_initialized():
    return bool(seen)
if mpi4py.initialize:
    Init()
"""
PROGRAM = """
import subprocess, sys
import mpi4py
mpi4py.initialize = sys.argv[1] == "True"
from mpi4py import MPI
MPI.Is_initialized() or MPI.Init()
subprocess.run([sys.argv[2]], check=True)
print(*MPI.seen)
"""


def put(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def moved(tmp_path):
    """An environment with a stand-in for mpi4py, which was not built for its folder."""
    environment = tmp_path / "moved"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.symlink_to(sys._base_executable)
    put(environment / "pyvenv.cfg", f"home = {Path(sys._base_executable).parent}\n")
    packages = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    put(packages / "mpi4py" / "__init__.py", "")
    put(packages / "mpi4py" / "MPI.py", MPI4PY)
    return environment


def install(environment):
    subprocess.run([environment / "bin" / "python", SCRIPTS / "openmpi_prefix.py"], check=True)
    packages = next(environment.glob("lib/*/site-packages"))
    return sorted(file.name for file in packages.glob("openmpi*"))


def seen(environment, tmp_path, *, initialize=True, foreign="#!/bin/sh\n", **variables):
    foreign = put(tmp_path / "mpirun", foreign, 0o755)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    words = [environment / "bin" / "python", "-c", PROGRAM, str(initialize), foreign]
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(("wrapper", "initialize"), [("orterun_wrapper", True), ("ompirun_wrapper", False)])
def test_mpi_finds_its_files_and_children_inherit_nothing(moved, tmp_path, initialize, wrapper):
    (moved / "bin" / wrapper).touch()
    assert install(moved) == ["openmpi-prefix.pth", "openmpi_prefix.py"]
    assert seen(moved, tmp_path, initialize=initialize, foreign=FOREIGN) == str(moved)


def test_another_mpi_and_what_a_launcher_has_set_stay_as_they_are(moved, tmp_path):
    wrapper = moved / "bin" / "orterun_wrapper"
    wrapper.touch()
    install(moved)
    assert seen(moved, tmp_path, OPAL_PREFIX="/of/mpirun") == "/of/mpirun"
    wrapper.unlink()
    assert seen(moved, tmp_path) == "None"
    assert install(moved) == []


@pytest.mark.slow  # torch is imported
def test_mpi4py_and_horovod_start_alone_in_this_environment(tmp_path):
    foreign = put(tmp_path / "mpirun", FOREIGN, 0o755)
    env = {name: value for name, value in os.environ.items() if not name.endswith("_PREFIX")}
    for start in ("from mpi4py import MPI", "import horovod.torch as hvd; hvd.init()"):
        program = f"import subprocess; {start}; subprocess.run(['{foreign}'], check=True)"
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, start + done.stdout + done.stderr
