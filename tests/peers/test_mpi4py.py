"""mpi4py's own tests, from its sdist, end under hvdlaunch as under plain mpirun."""

import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.peers.conftest import PROJECT
from tests.peers.launchers import status_of


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """The folder of the tests; the sdist has a hash in the lock and is kept in the environment."""
    kept = Path(sys.prefix) / "sdist"
    file = kept / f"mpi4py-{version('mpi4py')}.tar.gz"
    if not file.exists():
        (entry,) = re.findall(
            r"^mpi4py==.*?(?=^\S|\Z)", (PROJECT / "requirements/run-torch2.11.lock").read_text(), re.M | re.S
        )
        lock = tmp_path_factory.mktemp("lock") / "mpi4py.lock"
        lock.write_text(entry)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "mpi4py"]
        subprocess.run([*pip, "--require-hashes", "--requirement", lock, "--dest", kept], check=True)
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / file.name.removesuffix(".tar.gz") / "test" / "main.py"


def test_the_suite_of_mpi4py_ends_the_same(suite, note, tmp_path):
    ends = {}
    for launcher in ("mpirun", "hvdlaunch"):
        folder = tmp_path / launcher
        status = status_of(folder, launcher, str(suite), "--verbose", MPIEXEC_TIMEOUT="900")
        printed = (folder / "out").read_text(errors="replace") + (folder / "err").read_text(errors="replace")
        ran = sorted(map(int, re.findall(r"Ran (\d+) tests", printed)))
        results = sorted(re.findall(r"\b((?:OK|FAILED)(?: \([^)]*\))?)", printed))
        ends[launcher] = (status, ran, results)
        note("peers-mpi4py", {"launcher": launcher, "version": version("mpi4py")},
             status=status, tests=", ".join(map(str, ran)), results=", ".join(results))  # fmt: skip
    assert ends["mpirun"][0] == 0, ends
    assert len(ends["mpirun"][1]) == 2
    assert ends["hvdlaunch"] == ends["mpirun"]
