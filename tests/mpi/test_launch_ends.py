"""How a run of hvdlaunch ends: by a failing rank, by bad input, by a signal, by kill -9; nothing of it lives on."""

import contextlib
import os
import shlex
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.mpi.conftest import left_in, slow, wait_until
from tests.mpi.launched import PLACE, argv, finished, lines, recorder, running, signals, started

STAY = [*PLACE, "--stay"]


@pytest.mark.parametrize(
    ("launcher", "how", "status", "said"),
    [
        ("mpirun", "3", 3, "ended with status 3"),
        ("mpirun", "SIGKILL", 137, "died of signal 9 (Killed), perhaps out of memory"),
        slow("horovodrun", "3", 3, "ended with status 3"),
    ],
)
def test_a_failing_rank_is_named_in_one_line(tmp_path, launcher, how, status, said):
    done = finished(tmp_path, argv("--launcher", launcher, program=[*PLACE, "--end", "1", how]))
    assert done.returncode == status, done.stdout + done.stderr
    assert lines(done) == [f"hvdlaunch: error: rank 1 on localhost {said}"]


@pytest.mark.parametrize(
    ("launcher", "kill", "number"),
    [
        ("mpirun", os.kill, signal.SIGTERM),
        ("mpirun", os.killpg, signal.SIGINT),
        slow("horovodrun", os.kill, signal.SIGTERM),
    ],
    ids=["SIGTERM to hvdlaunch alone", "Ctrl-C in a terminal", "horovodrun"],
)
def test_a_signal_ends_the_ranks(tmp_path, launcher, kill, number):
    with started(tmp_path, argv("--launcher", launcher, program=STAY)) as job:
        running(tmp_path)
        kill(job.pid, number)
        assert job.wait(timeout=10) == 128 + number
        assert signals(tmp_path) == [["SIGTERM"]] * 2
        wait_until(lambda: not left_in(tmp_path), 1)


def test_the_second_ctrl_c_ends_at_once(tmp_path):
    """Where mpirun itself does not react to the first."""
    with started(tmp_path, argv(program=STAY)) as job:
        running(tmp_path)
        (mpirun,) = (one for one in left_in(tmp_path) if one.cmdline()[0].endswith("mpirun"))
        mpirun.suspend()
        os.kill(job.pid, signal.SIGINT)
        time.sleep(1)
        assert job.poll() is None
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(timeout=4) == 130
        wait_until(lambda: not left_in(tmp_path), 1)


def test_sigusr1_reaches_ranks_that_have_no_handler_yet(tmp_path):
    """Also behind a shell that would die of it."""
    behind = ["sh", "-c", f"{shlex.join([*STAY, '--deaf'])}; :"]
    with started(tmp_path, argv(program=behind)) as job:
        running(tmp_path)
        os.kill(job.pid, signal.SIGUSR1)
        time.sleep(0.5)
        assert (signals(tmp_path), job.poll()) == ([], None)
        (tmp_path / "go").touch()
        wait_until(lambda: signals(tmp_path) == [["SIGUSR1"]] * 2, 10)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=10) == 143
    # A rank ends with the shell that started it, which SIGTERM ends, too: it may be before the rank has noted it.
    assert [names[0] for names in signals(tmp_path)] == ["SIGUSR1"] * 2


def has_launcher(pid):
    with contextlib.suppress(psutil.Error):  # of a child that has just ended
        return any("launch.run.rank.bind" in one.cmdline() for one in psutil.Process(pid).children())


def test_sigusr1_is_kept_until_the_ranks_can_live_with_it(tmp_path):
    """It comes the moment that mpirun starts, when neither it nor the ranks handle it."""
    with started(tmp_path, argv(program=STAY)) as job:
        wait_until(lambda: has_launcher(job.pid), 10)
        time.sleep(0.02)  # it has started the launcher, and takes over its signals next
        os.kill(job.pid, signal.SIGUSR1)
        wait_until(lambda: signals(tmp_path) == [["SIGUSR1"]] * 2, 30)
        assert job.poll() is None


def is_mpirun(process):
    return Path(process.cmdline()[0]).name == "mpirun"


def is_hvdlaunch(process):
    """Its keeper looks like it: who kills the one by name kills both."""
    return "launch" in process.cmdline() and "launch.run.rank.bind" not in process.cmdline()


@pytest.mark.parametrize("victims", [[is_mpirun], [is_hvdlaunch], slow([is_hvdlaunch, is_mpirun])])
def test_nothing_outlives_kill_9(tmp_path, victims):
    with started(tmp_path, argv(program=STAY)) as job:
        running(tmp_path)
        killed = [one for one in left_in(tmp_path) if any(is_one(one) for is_one in victims)]
        assert len(killed) == sum(2 if is_one is is_hvdlaunch else 1 for is_one in victims)
        for one in killed:
            one.kill()
        wait_until(lambda: not left_in(tmp_path), 5)
        assert job.wait(timeout=1) == (-signal.SIGKILL if is_hvdlaunch in victims else 137)
    if victims == [is_mpirun]:
        assert (tmp_path / "out").read_text().splitlines()[
            -1
        ] == "hvdlaunch: error: the launcher exited with status 137"


@pytest.mark.slow
def test_nothing_outlives_kill_9_of_what_ranks_start_without_a_mark(tmp_path):
    program = ["env", "-i", f"PATH={os.environ['PATH']}", "sh", "-c", "trap '' TERM; sleep 97 & wait"]
    with started(tmp_path, argv(program=program)) as job:
        wait_until(lambda: sum(one.name() == "sleep" for one in left_in(tmp_path)) == 2, 20)
        job.kill()
        wait_until(lambda: not left_in(tmp_path), 8)


def test_a_secret_in_place_of_a_name_is_refused_before_anything_starts_and_not_repeated(tmp_path):
    record = recorder(tmp_path, "mpirun")
    done = finished(tmp_path, argv("-x", "TOKEN=secret", program=PLACE))
    assert done.returncode == 2
    (line,) = lines(done)
    assert line.startswith("hvdlaunch: error: ")
    assert "'TOKEN'" in line
    assert "secret" not in line
    assert not record.exists()
