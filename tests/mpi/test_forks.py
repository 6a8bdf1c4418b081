"""A rank that is a fork is to its launcher what a rank is that has started by itself."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from tests.mpi.conftest import PROGRAMS, environment
from tests.mpi.forks import BY_ITSELF


def unusual():
    """What a launcher may hand on to its ranks."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.umask(0o027)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000))


def told(folder, end, **env):
    """Run the program to its end; what it has found, its status and its standard error."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "told.py"), end],
        cwd=folder,
        env={**environment(folder), "MARK": "1", **env},
        input="asked\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=unusual,
    )
    return json.loads(done.stdout), done.returncode, done.stderr


@pytest.mark.parametrize("end", ["3", "-15"])
def test_it_finds_and_leaves_what_a_start_of_its_own_would(tmp_path, end):
    found, *left = told(tmp_path, end)
    by_itself, *left_by_itself = told(tmp_path, end, **BY_ITSELF)
    assert (found.pop("loaded"), by_itself.pop("loaded")) == (True, False)  # it was a fork
    assert found == by_itself
    assert left == left_by_itself == [int(end), "to standard error\n"]
    assert found["read"] == "asked\n"
