"""The process of which ranks are forks, one for all workers of a pytest; it starts when it is first asked for."""

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parents[2]
START = Path(__file__).parent / "start"  # its sitecustomize is what Python itself imports in each rank
# Read when Python or a library starts: who has others starts by itself.
FIXED = {
    "PYTHONPATH": f"{START}:{PROJECT}",  # programs take tests.steps from there
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",  # threads that wait for a busy core are slower than one
    "KMP_DUPLICATE_LIB_OK": "True",  # as a test that imports scikit-learn leaves it
    "KMP_INIT_AT_FORK": "FALSE",
}
BY_ITSELF = {"TESTS_FORKSERVER": ""}  # for a rank that is to import what it needs


def environment() -> dict[str, str]:
    """That of ranks which are forks."""
    return {**FIXED, "TESTS_FORKSERVER": _address()}


@cache
def _address() -> str:
    """The first worker starts it; it ends with the last, when nobody could write to its standard input any more."""
    name = f"forks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.urandom(8).hex())}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lifeline, patient = folder / "lifeline", folder / "patient.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_first := not lifeline.exists():
            os.mkfifo(lifeline)
        os.open(lifeline, os.O_RDWR)  # until this process ends
        if not is_first:
            return name
        subprocess.run(["g++", "-shared", "-fPIC", "-O2", "-o", patient, START / "patient.cpp"], check=True)
        with lifeline.open() as end:
            server = subprocess.Popen(
                [sys.executable, str(START / "forkserver.py"), name],
                cwd=folder,
                env={**os.environ, **FIXED, "LD_PRELOAD": str(patient)},  # the forks have it too, but not the variable
                stdin=end,
                start_new_session=True,
            )
    atexit.register(server.poll)  # keeps it
    return name
