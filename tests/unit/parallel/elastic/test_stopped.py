import os
import signal
import subprocess

import pytest

from hvdtrain.parallel.elastic.stopped import StoppedNeighbours


@pytest.fixture
def sleeping():
    """Two processes."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_process_that_stays_stopped_is_ended_and_others_are_not(sleeping):
    stopped, works = sleeping
    stop(stopped)
    looks = StoppedNeighbours([stopped.pid, works.pid], limit_s=1.0)
    looks.kill_overdue(0.6)
    assert stopped.poll() is None
    looks.kill_overdue(0.6)
    assert stopped.wait(10) == -signal.SIGKILL
    assert works.poll() is None
    looks.kill_overdue(0.6)  # one that has ended is forgotten


def test_time_counts_anew_after_it_went_on(sleeping):
    process, _ = sleeping
    looks = StoppedNeighbours([process.pid], limit_s=1.0)
    stop(process)
    looks.kill_overdue(0.6)
    os.kill(process.pid, signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)
    looks.kill_overdue(0.6)
    stop(process)
    looks.kill_overdue(0.6)
    assert process.poll() is None
