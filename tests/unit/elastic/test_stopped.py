import os
import signal
import subprocess

from hvdtrain.elastic.stopped import StoppedNeighbours


def test_a_process_that_stays_stopped_is_ended_and_others_are_not():
    stopped, works = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        looks = StoppedNeighbours([stopped.pid, works.pid], limit_s=1.0)
        looks.kill_overdue(0.6)
        assert stopped.poll() is None
        looks.kill_overdue(0.6)
        assert stopped.wait(10) == -signal.SIGKILL
        assert works.poll() is None
    finally:
        for process in (stopped, works):
            process.kill()
            process.wait()


def test_time_counts_anew_after_it_went_on():
    process = subprocess.Popen(["sleep", "60"])
    try:
        looks = StoppedNeighbours([process.pid], limit_s=1.0)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        looks.kill_overdue(0.6)
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        looks.kill_overdue(0.6)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        looks.kill_overdue(0.6)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_one_that_has_ended_is_forgotten():
    process = subprocess.Popen(["true"])
    process.wait()
    StoppedNeighbours([process.pid], limit_s=0.0).kill_overdue(1.0)
