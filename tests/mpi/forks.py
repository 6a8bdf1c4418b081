"""The process of which ranks are forks, one for each pytest; it starts when it is first asked for."""

import atexit
import os
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
}
BY_ITSELF = {"TESTS_FORKSERVER": ""}  # for a rank that is to import what it needs


def environment() -> dict[str, str]:
    """That of ranks which are forks."""
    return {**FIXED, "TESTS_FORKSERVER": _address()}


@cache
def _address() -> str:
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    name, patient = f"forks-{os.urandom(8).hex()}", f"{folder.name}/patient.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-O2", "-o", patient, str(START / "patient.cpp")], check=True)
    server = subprocess.Popen(
        [sys.executable, str(START / "forkserver.py"), name],
        cwd=folder.name,
        env={**os.environ, **FIXED, "LD_PRELOAD": patient},  # the forks have it too, but not the variable
        stdin=subprocess.PIPE,
        start_new_session=True,
    )

    @atexit.register
    def end() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    return name
