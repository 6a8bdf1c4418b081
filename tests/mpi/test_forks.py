"""A rank that is a fork is to its launcher what a rank is that has started by itself."""

import json
import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from tests.mpi.conftest import PROGRAMS, environment, wait_until
from tests.mpi.forks import BY_ITSELF, PROJECT

TOLD = [sys.executable, str(PROGRAMS / "told.py")]


def unusual():
    """What a launcher may hand on to its ranks."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.umask(0o027)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000))


@pytest.fixture
def told(tmp_path):
    """Run the program to its end; what it has found, its status and its standard error, by itself or as a fork."""

    def start(*words, **env):
        done = subprocess.run(
            [*TOLD, *words],
            cwd=tmp_path,
            env={**environment(tmp_path), "MARK": "1", **env},
            input="asked\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            preexec_fn=unusual,
        )
        return json.loads(done.stdout), done.returncode, done.stderr

    return start


@pytest.mark.parametrize("end", ["0", "3", "-9", "-15"])
def test_it_finds_and_leaves_what_a_start_of_its_own_would(told, end):
    found, *left = told(end)
    by_itself, *left_by_itself = told(end, **BY_ITSELF)
    assert (found.pop("loaded"), by_itself.pop("loaded")) == (True, False)  # it was a fork
    assert found == by_itself
    assert left == left_by_itself == [int(end), "to standard error\n"]
    assert found["read"] == "asked\n"


def test_its_exceptions_are_seen(told):
    _, status, said = told("raise")
    assert status == 1
    assert said.endswith("ValueError: planted\n")


def test_who_needs_other_settings_of_python_or_its_libraries_is_none(told):
    assert told("0", OMP_NUM_THREADS="2")[0]["loaded"] is False
    assert told("0")[0]["loaded"] is True


@pytest.fixture
def sleeping(tmp_path):
    """A fork that sleeps: the process that stands for it, and its own process id."""
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with subprocess.Popen([*TOLD, "sleep"], cwd=tmp_path, env=environment(tmp_path), **nothing) as stand_in:
        [file] = wait_until(lambda: list(tmp_path.glob("pid-*")), 60)
        yield stand_in, int(file.name.removeprefix("pid-"))
        stand_in.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_signals_reach_it(sleeping, number):
    stand_in, _ = sleeping
    stand_in.send_signal(number)
    assert stand_in.wait(10) == -number


def test_it_dies_with_the_process_that_stands_for_it(sleeping):
    stand_in, pid = sleeping
    assert pid != stand_in.pid
    stand_in.kill()
    wait_until(lambda: not psutil.pid_exists(pid), 10)


@pytest.mark.slow
def test_it_dies_with_a_pytest_that_is_killed(tmp_path):
    driver = (
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "from tests.mpi.conftest import environment\n"
        f"subprocess.run({[*TOLD, 'sleep']}, env=environment(Path.cwd()), stdin=subprocess.DEVNULL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", driver], cwd=tmp_path, env=env) as pytest_:
        [file] = wait_until(lambda: list(tmp_path.glob("pid-*")), 60)
        fork = psutil.Process(int(file.name.removeprefix("pid-")))
        left = [fork, fork.parent(), *psutil.Process(pytest_.pid).children()]
        assert len(left) == 4  # the server is a child of both
        pytest_.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(one.is_running() for one in left), 10)
