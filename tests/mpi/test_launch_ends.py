"""How a run of hvdlaunch ends: by a failing rank, by bad input, by a signal, by kill -9; nothing of it lives on."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.mpi.conftest import EFFNET, QUICK, left_in, slow, wait_until
from tests.mpi.launched import PLACE, argv, finished, lines, recorder, running, signals, started

HERE = os.uname().nodename
STAY = [*PLACE, "--stay"]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs the option")


def pending(pid):
    """The signals that have reached a process and wait to be unblocked."""
    lines_of = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines_of if line.startswith("ShdPnd"))
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


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


def test_a_failing_training_shows_the_tail_of_its_error_file(tmp_path):
    fault = "raise@rank1:step3"
    done = finished(tmp_path, argv(program=["python", *EFFNET, *QUICK, "--run", "r"]), HVDTRAIN_FAULT=fault)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stderr.splitlines()
    at = [number for number, line in enumerate(said) if line.startswith("hvdlaunch: error: rank ")]
    assert len(at) == 1, done.stderr
    rank = 1
    assert said[at[0]] == f"hvdlaunch: error: rank {rank} on localhost ended with status 1 at step 3; its last words:"
    tail = said[at[0] + 1 :]
    assert len(tail) <= 13
    assert tail[-2].strip() == f"RuntimeError: injected fault {fault}"
    assert tail[-1].strip().endswith(f"runs/effnet/r/ranks/rank-{rank}.err")
    assert "mpirun" not in done.stderr


def test_a_bad_training_option_is_one_line(tmp_path):
    done = finished(tmp_path, argv(program=["python", *EFFNET, *QUICK, "--recipe", "soup"]))
    assert done.returncode == 2
    (line,) = lines(done)
    assert "hvdtrain: " in line
    assert "soup" in line


MPICH = "HYDRA build details:\n    Version:                                 4.2.0"


@pytest.mark.parametrize(
    ("words", "program", "version", "named"),
    [
        ([], ["no-such-program"], "mpirun (Open MPI) 4.1.8", ["'no-such-program'", "after --"]),
        slow([], ["./place"], "mpirun (Open MPI) 4.1.8", ["'./place'"]),
        ([], PLACE, MPICH, ["MPICH 4.2.0", "Open MPI 4 or 5", "PATH"]),
        slow([], PLACE, "mpirun (Open MPI) 3.1.6", ["Open MPI 3.1.6", "Open MPI 4 or 5"]),
        slow([], PLACE, "what?", ["does not say which MPI", "Open MPI 4 or 5"]),
        slow(["-H", "localhost:1"], PLACE, "mpirun (Open MPI) 4.1.8", ["-np 2", "1 available slots"]),
        slow(["--gpus", "0,1"], PLACE, "mpirun (Open MPI) 4.1.8", ["localhost", "no GPU"]),
        slow(["-x", "NOWHERE"], PLACE, "mpirun (Open MPI) 4.1.8", ["NOWHERE"]),
        (["-x", "TOKEN=secret"], PLACE, "mpirun (Open MPI) 4.1.8", ["'TOKEN'"]),
        slow(["--launcher", "srun"], PLACE, "mpirun (Open MPI) 4.1.8", ["srun", "horovodrun"]),
        slow([], [], "mpirun (Open MPI) 4.1.8", ["no program"]),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, list) else value.split()[0],
)
def test_bad_input_is_one_line_before_anything_starts(tmp_path, words, program, version, named):
    record = recorder(tmp_path, "mpirun", version=version)
    done = finished(tmp_path, argv(*words, program=program))
    assert done.returncode == 2
    (line,) = lines(done)
    assert line.startswith("hvdlaunch: ")
    assert all(word in line for word in named), line
    assert "secret" not in line
    assert not record.exists()


@AS_ROOT
def test_root_must_say_so(tmp_path):
    record = recorder(tmp_path, "mpirun")
    done = finished(tmp_path, [word for word in argv(program=PLACE) if word != "--allow-run-as-root"])
    assert done.returncode == 2
    assert len(lines(done)) == 1
    assert "--allow-run-as-root" in done.stderr
    assert not record.exists()


@pytest.mark.parametrize("launcher", ["mpirun", slow("horovodrun")])
def test_a_missing_launcher_is_named(tmp_path, launcher):
    (tmp_path / "bin").mkdir()
    if launcher == "horovodrun":
        recorder(tmp_path, "mpirun")
    done = finished(tmp_path, argv("--launcher", launcher, program=PLACE), PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    (line,) = lines(done)
    assert line.startswith(f"hvdlaunch: error: no {launcher} on PATH")


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("mpirun", signal.SIGTERM),
        ("mpirun", signal.SIGINT),
        slow("mpirun", signal.SIGHUP),
        slow("horovodrun", signal.SIGTERM),
    ],
)
def test_a_signal_to_hvdlaunch_alone_ends_the_ranks(tmp_path, launcher, number):
    with started(tmp_path, argv("--launcher", launcher, program=STAY)) as job:
        running(tmp_path)
        os.kill(job.pid, number)
        assert job.wait(timeout=10) == 128 + number
        assert signals(tmp_path) == [["SIGTERM"]] * 2
        wait_until(lambda: not left_in(tmp_path), 1)


def test_ctrl_c_of_a_terminal_ends_the_ranks(tmp_path):
    with started(tmp_path, argv(program=STAY)) as job:
        running(tmp_path)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(timeout=10) == 130
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


@pytest.mark.slow
def test_a_launcher_that_hears_nothing_is_ended_after_a_while(tmp_path):
    with started(tmp_path, argv(program=STAY)) as job:
        running(tmp_path)
        (mpirun,) = (one for one in left_in(tmp_path) if one.cmdline()[0].endswith("mpirun"))
        mpirun.suspend()
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=12) == 143
        wait_until(lambda: not left_in(tmp_path), 1)


def test_sigusr1_reaches_ranks_that_have_no_handler_yet(tmp_path):
    with started(tmp_path, argv(program=[*STAY, "--deaf"])) as job:
        pids = [one["pid"] for one in running(tmp_path)]
        os.kill(job.pid, signal.SIGUSR1)
        wait_until(lambda: all(signal.SIGUSR1 in pending(pid) for pid in pids), 10)
        assert signals(tmp_path) == []
        (tmp_path / "go").touch()
        wait_until(lambda: signals(tmp_path) == [["SIGUSR1"]] * 2, 10)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=10) == 143
    assert signals(tmp_path) == [["SIGUSR1", "SIGTERM"]] * 2


def has_launcher(pid):
    with contextlib.suppress(psutil.Error):  # of a child that has just ended
        return any("launch.rank.bind" in one.cmdline() for one in psutil.Process(pid).children())


@pytest.mark.parametrize("launcher", ["mpirun", slow("horovodrun")])
def test_sigusr1_is_kept_until_the_ranks_can_live_with_it(tmp_path, launcher):
    """It comes the moment that mpirun starts, when neither it nor the ranks handle or block it."""
    with started(tmp_path, argv("--launcher", launcher, program=STAY)) as job:
        wait_until(lambda: has_launcher(job.pid), 10)
        time.sleep(0.02)  # it has started the launcher, and takes over its signals next
        os.kill(job.pid, signal.SIGUSR1)
        wait_until(lambda: signals(tmp_path) == [["SIGUSR1"]] * 2, 30)
        assert job.poll() is None


@pytest.mark.parametrize(
    ("launcher", "victims"),
    [
        ("mpirun", "hvdlaunch"),
        ("mpirun", "mpirun"),
        ("mpirun", "hvdlaunch mpirun"),
        slow("horovodrun", "mpirun"),
    ],
)
def test_nothing_outlives_kill_9(tmp_path, launcher, victims):
    with started(tmp_path, argv("--launcher", launcher, program=STAY)) as job:
        pids = [one["pid"] for one in running(tmp_path)]
        (mpirun,) = (one for one in left_in(tmp_path) if Path(one.cmdline()[0]).name == "mpirun")
        assert set(pids) <= {one.pid for one in mpirun.children(recursive=True)}
        if "hvdlaunch" in victims:
            job.kill()
        if "mpirun" in victims:
            mpirun.kill()
        wait_until(lambda: not left_in(tmp_path), 5)
        assert job.wait(timeout=1) == (-signal.SIGKILL if "hvdlaunch" in victims else 137)
    if victims == "mpirun":
        said = (tmp_path / "out").read_text().splitlines()  # horovodrun's shell says "Killed"
        assert said[-1] == "hvdlaunch: error: the launcher exited with status 137"


def test_nothing_outlives_a_run_whose_rank_left_a_process(tmp_path):
    done = finished(tmp_path, argv(program=["sh", "-c", "sleep 300 > /dev/null 2>&1 & exit 0"]))
    assert done.returncode == 0, done.stderr
    assert lines(done) == []
