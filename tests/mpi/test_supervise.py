"""hvdlaunch run, preempted and started again, with the real launchers and a stand-in for the training."""

import json
import os
import signal
import sys

import pytest

from tests.metadata import events, plain, service
from tests.mpi.conftest import PROGRAMS, left_in, slow, wait_until
from tests.mpi.launched import argv, finished, lines, started

STEPS = [sys.executable, str(PROGRAMS / "steps.py"), "."]
AGAIN = ["--restarts", "5", "--min-np", "1"]
ENDLESS = ["--until", "never"]


def attempts(folder):
    """(ranks, the step that it goes on from) of every attempt."""
    (file,) = folder.glob("*/attempts.jsonl")
    return [(one["ranks"], one["from"]) for one in map(json.loads, file.read_text().splitlines())]


def saved(folder):
    """The newest checkpoint's step, once there is one."""
    return next((int(file.read_text()) for file in folder.glob("*/checkpoint")), None)


def said(folder):
    return [line for line in (folder / "out").read_text().splitlines() if "running on CPU" not in line]


@pytest.mark.parametrize("launcher", ["mpirun", slow("horovodrun")])
def test_asked_to_end_it_saves_and_the_same_command_goes_on(tmp_path, launcher):
    with started(tmp_path, argv("--launcher", launcher, program=[*STEPS, *ENDLESS])) as job:
        wait_until(lambda: saved(tmp_path), 20)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=10) == 0
    wait_until(lambda: not left_in(tmp_path), 5)
    (line,) = said(tmp_path)
    step = saved(tmp_path)
    assert line.startswith(f"hvdlaunch: note: stopped and saved at step {step}.")
    name = line.partition("HVDLAUNCH_JOB=")[2].split()[0]
    done = finished(tmp_path, argv(program=[*STEPS, "--steps", str(step + 2)]), HVDLAUNCH_JOB=name)
    assert done.returncode == 0, done.stderr
    assert attempts(tmp_path) == [(2, 0), (2, step)]


def test_a_notice_that_this_host_is_ended_saves_and_ends_the_run(tmp_path):
    words = argv("--spot", "azure", *AGAIN, program=[*STEPS, *ENDLESS])
    with service(plain, events()) as (server, address):
        with started(tmp_path, words, _HVDLAUNCH_METADATA=address) as job:
            wait_until(lambda: saved(tmp_path), 20)
            server.values |= events("Preempt")
            assert job.wait(timeout=20) == 0
        wait_until(lambda: not left_in(tmp_path), 5)
    warning, note = said(tmp_path)
    assert warning.endswith("host localhost: Azure will preempt this instance; stopping the run")
    assert note.startswith(f"hvdlaunch: note: stopped and saved at step {saved(tmp_path)}.")
    assert attempts(tmp_path) == [(2, 0)]


def test_the_deadline_does_not_wait_for_the_program(tmp_path):
    with started(tmp_path, argv("--grace-s", "1", *AGAIN, program=[*STEPS, *ENDLESS, "--obstinate"])) as job:
        wait_until(lambda: saved(tmp_path), 20)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=8) == 143
    [line] = said(tmp_path)
    assert line.startswith("hvdlaunch: note: stopped before the ranks could save: the checkpoint of step ")
    assert not left_in(tmp_path)


def test_after_a_failure_it_goes_on_from_the_newest_checkpoint(tmp_path):
    done = finished(tmp_path, argv(*AGAIN, program=[*STEPS, "--fault", "1", "7", "kill"]))
    assert done.returncode == 0, done.stderr
    assert attempts(tmp_path) == [(2, 0), (2, 5)]
    killed = "rank 1 on localhost died of signal 9 (Killed), perhaps out of memory, at step 7"
    told = lines(done)
    assert told[0].startswith(f"hvdlaunch: error: {killed}")
    assert told[-1] == f"hvdlaunch: warning: restart 1 of 5 after: {killed}; 2 ranks on localhost:2, from step 5"
    (log,) = tmp_path.glob("logs/*/hvdlaunch.log")
    kept = [line[20:] for line in log.read_text().splitlines()]
    assert [line for line in kept if line in told] == told
    assert [line for line in kept if line.startswith(("attempt", "ended"))] == [
        *("attempt 0", f"ended with status 137: {killed}", "attempt 1", "ended with status 0")
    ]


def test_fewer_slots_in_the_hostfile_make_fewer_ranks_and_the_program_may_refuse_some(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n")
    program = [*STEPS, "--takes", "4,2", "--fault", "3", "7", "hang"]
    words = ["-np", "4", "--restarts", "1", "--min-np", "2", "--hostfile", "hosts"]
    with started(tmp_path, argv(*words, program=program)) as job:
        wait_until(lambda: saved(tmp_path), 20)
        hosts.write_text("localhost slots=3\n")
        assert job.wait(timeout=30) == 0
    assert attempts(tmp_path) == [(4, 0), (2, 5)]
    refused = "steps: 3 ranks do not divide 12"
    assert [line for line in said(tmp_path) if refused in line] == [
        refused,
        f"hvdlaunch: warning: restart 1 of 1 after: {refused}; 2 ranks on localhost:2, from step 5",
    ]
