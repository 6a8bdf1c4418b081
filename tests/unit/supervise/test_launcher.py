import os
import signal
import time
from types import SimpleNamespace

import pytest

from launch import process
from launch.process import BIND_S, Launcher, Stat

SHELL, MPIRUN, RANK = 10, 11, 12


@pytest.fixture
def launcher(monkeypatch):
    """A launcher that runs already: a shell, mpirun below it, and a rank of which the test sets the age."""
    running = object.__new__(Launcher)
    running.pid, running._held, running.age_s, running.sent = SHELL, False, 0.0, []
    running._process = SimpleNamespace(wait=lambda _: 0)
    parents = {SHELL: 1, MPIRUN: SHELL, RANK: MPIRUN}

    def session(_):
        started_s = time.clock_gettime(time.CLOCK_BOOTTIME) - running.age_s
        return {
            pid: Stat(state="S", parent=parent, session=SHELL, started_s=started_s) for pid, parent in parents.items()
        }

    monkeypatch.setattr(process, "_session", session)
    monkeypatch.setattr(process, "_mpirun_in", lambda _: MPIRUN)
    monkeypatch.setattr(os, "kill", lambda pid, number: running.sent.append((pid, number)))
    return running


def test_sigusr1_is_kept_until_the_ranks_can_live_with_it(launcher):
    launcher.age_s = BIND_S / 2
    launcher.signal(signal.SIGUSR1)
    assert launcher.wait(0.1) == 0
    assert launcher.sent == []
    launcher.age_s = BIND_S + 0.1
    assert launcher.wait(0.1) == 0
    assert launcher.wait(0.1) == 0
    assert launcher.sent == [(MPIRUN, signal.SIGUSR1)]


def test_sigusr1_reaches_mpirun_at_once_where_the_ranks_are_up(launcher):
    launcher.age_s = BIND_S + 0.1
    launcher.signal(signal.SIGUSR1)
    assert launcher.sent == [(MPIRUN, signal.SIGUSR1)]


def test_a_request_to_end_is_never_kept(launcher):
    launcher.signal(signal.SIGTERM)
    assert launcher.sent == [(MPIRUN, signal.SIGTERM)]


def test_the_kernel_tells_of_a_process_until_it_is_gone():
    found = process.stat(os.getpid())
    assert (found.state, found.parent, found.session) == ("R", os.getppid(), os.getsid(0))
    assert 0 < found.started_s < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert process.processes()[os.getpid()].parent == os.getppid()
    assert process.stat(1 << 22) is None  # above the largest that Linux gives
