"""A run that is asked to leave saves, leaves with 0, and loses no step."""

import os
import signal
import time

import pytest

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi.conftest import EFFNET, PROGRAMS, TIMEOUT_S, folder_of_images, left_in, long, wait_until
from tests.mpi.interrupted import SHORT, same_end
from tests.mpi.launched import argv, started
from tests.refusals import require_facts

# Nothing is saved but for leaving.
ONLY_ASKED = (*SHORT, "--checkpoint-every", "1000steps")


def left_well(run, said):
    """The step at which a run left with a checkpoint, nothing lost."""
    step = run.result["steps"]
    assert run.result["exit_reason"] == "preempted"
    assert run.checkpoints[-1] == f"step-{step:09d}"
    assert checkpoint.find_newest(run.path / "checkpoints")[1] == []
    assert not list(run.path.rglob("*.part"))
    # These come from the test itself: faults, few steps, and a folder of images.
    expected = ("injected", "few models learn in fewer than", "files used")
    [line] = [one for one in said.splitlines() if "hvdtrain: " in one and not any(map(one.count, expected))]
    require_facts(line, f"hvdtrain: note: saved at step {step} ... --run r")
    return step


@pytest.fixture
def goes_on(reference):
    """Start it again, to its end, which has to be that of a run that was not asked."""

    def check(run, words=SHORT, **options):
        said = run.finish()
        assert "resumed from runs/effnet/r/checkpoints/step-" in said
        same_end(run, reference(run.ranks, words), **options)

    return check


@pytest.mark.slow
def test_before_its_first_step(runs, tmp_path):
    run = runs(2, ONLY_ASKED)
    blocked = tmp_path / "blocked"
    with run.started(program=(str(PROGRAMS / "wait_unasked.py"), str(blocked))) as job:
        wait_until(lambda: blocked.exists() and len(list(blocked.iterdir())) == 2, TIMEOUT_S)
        job.send_signal(signal.SIGUSR1)
        assert left_well(run, run.ended(job)) in (1, 2)


# --- one process without a launcher


@pytest.mark.slow
def test_one_process_saves_at_a_first_sigterm_and_at_a_first_ctrl_c(runs, goes_on):
    words = (*ONLY_ASKED, "--epochs", "1")
    run = runs(1, words)
    assert left_well(run, run.asked("step1", by=signal.SIGTERM)) in (1, 2)
    assert left_well(run, run.asked("step10", by=signal.SIGINT)) in (10, 11)
    assert left_well(run, run.asked("eval1", by=signal.SIGTERM)) == 12
    goes_on(run, words, whole_history=False)


def test_one_process_leaves_at_once_at_a_second_one(runs):
    """It hangs, so that the first has no effect."""
    run = runs(1)
    with run.hanging("step9", saved=8) as job:
        job.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        assert job.wait(10) == 143
    assert run.result["exit_reason"] == "terminated"
    assert checkpoint.find_newest(run.path / "checkpoints")[0].step == 8


# --- a signal to the group of hvdlaunch, as by Ctrl-C in a terminal or by a batch system


@pytest.mark.slow
@pytest.mark.parametrize("number", [long(signal.SIGINT), signal.SIGTERM])
def test_a_signal_to_the_group_loses_no_checkpoint_and_shows_no_traceback(runs, tmp_path, number):
    """All ranks save and leave."""
    folder_of_images(tmp_path / "images", 20)
    words = ("--data", "imagefolder", "--data-dir", "images", "--model", "efficientnet_tiny", "--workers", "1")
    words = (*words, "--batch-size-per-rank", "4", "--epochs", "500", "--checkpoint-every", "5steps", "--run", "r")
    run = runs(2, words)
    with started(tmp_path, argv(program=["python", *EFFNET, *words])) as job:
        wait_until(lambda: len(run.checkpoints) > 1, TIMEOUT_S)
        os.killpg(job.pid, number)
        status = job.wait(TIMEOUT_S)
        wait_until(lambda: not left_in(tmp_path), 5)
    said = (tmp_path / "out").read_text()
    assert status == 0, said
    assert "Traceback" not in said
    assert left_well(run, said) >= 5
