"""The wheels in an environment of their own, which has only what they depend on."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.mpi.conftest import EFFNET, QUICK, environment
from tests.setup.commands import run

PROJECT = Path(__file__).parents[2]
FILES = ("Makefile", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
OURS = ("hvdtrain", "launch", "hvdlaunch", "horovod", "__editable__")

pytestmark = pytest.mark.slow


@pytest.fixture
def wheels(tmp_path):
    """What `make wheels` puts into dist/ of a clone, for this environment."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("hvdtrain", "launch", "packaging", "scripts", "requirements"):
        shutil.copytree(PROJECT / name, clone / name, symlinks=True)
    for file in FILES:
        shutil.copy(PROJECT / file, clone)
    built = Path(sys.prefix, "setup.stamp").read_text().split()[0]  # GPU=0 or 1: the Horovod that is kept already
    script = clone / "scripts/wheels.sh"
    subprocess.run([script, sys.prefix, clone / "dist"], env=os.environ | {"GPU": built[-1]}, check=True)
    wheels = {wheel.name.partition("-")[0]: wheel for wheel in (clone / "dist").iterdir()}
    assert {"horovod", "hvdlaunch", "hvdtrain", "mpi4py"} <= set(wheels)
    wheels = [wheels[name] for name in ("horovod", "hvdlaunch", "hvdtrain")]
    _, launchers, ours = [set(ZipFile(wheel).namelist()) for wheel in wheels]
    assert not launchers & ours  # else to remove one would break the other
    return wheels


@pytest.fixture
def elsewhere(tmp_path):
    """Another environment with all packages of this one but the project and Horovod; its Python."""
    folder = tmp_path / "elsewhere"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(OURS):
            (packages / package.name).symlink_to(package)
    for library in Path(sys.prefix, "lib").iterdir():  # Open MPI, if it is not the system's
        if not (folder / "lib" / library.name).exists():
            (folder / "lib" / library.name).symlink_to(library)
    return folder / "bin" / "python"


def test_the_wheels_train_elsewhere_and_ours_alone_says_what_is_missing(wheels, elsewhere, tmp_path):
    horovods, launcher, ours = wheels
    outside = {**environment(tmp_path), "PATH": f"{elsewhere.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": ""}
    del outside["PYTHONPATH"]

    def install(wheel):
        pip = [sys.executable, "-m", "pip", "--python", str(elsewhere), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)

    def start(*words):
        return run(words, cwd=tmp_path, env=outside, timeout=150)

    install(ours)
    [facts] = elsewhere.parents[1].glob("lib/python*/site-packages/hvdtrain-*.dist-info")
    assert "\nLicense-Expression: Apache-2.0\n" in (facts / "METADATA").read_text()
    for name in ("LICENSE", "NOTICE"):
        assert (facts / "licenses" / name).read_text() == (PROJECT / name).read_text()
    refused = start("mpirun", "--oversubscribe", "-np", "2", "python", *EFFNET, *QUICK)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    [line] = [line for line in refused.stderr.splitlines() if "hvdtrain" in line]
    assert line.startswith(f"hvdtrain: error: {elsewhere}: Horovod is not installed")
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()

    install(horovods)
    install(launcher)
    done = start(*("hvdlaunch", "run", "-np", "2", "--gpus", "none", "--", "python"), *EFFNET, *QUICK, "--run", "r")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "runs" / "effnet" / "r" / "result.json").read_text())["np"] == 2
