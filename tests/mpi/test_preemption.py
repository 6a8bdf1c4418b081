"""A run that is asked to leave saves, leaves with 0, and loses no step."""

import contextlib
import fcntl
import os
import signal
import subprocess
import termios
import threading
import time

import pytest

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi.conftest import EFFNET, PROGRAMS, TIMEOUT_S, environment, left_in, one_torn_image, wait_until
from tests.mpi.interrupted import SHORT, ended, same_end, stopping
from tests.mpi.launched import argv
from tests.refusals import require_facts

# Nothing is saved but for leaving.
ONLY_ASKED = (*SHORT, "--checkpoint-every-steps", "1000")


def left_well(run, said):
    """The step at which a run left with a checkpoint, nothing lost."""
    step = run.result["steps"]
    assert run.result["exit_reason"] == "preempted"
    assert run.checkpoints[-1] == f"step-{step:09d}"
    assert checkpoint.find_newest(run.path / "checkpoints")[1] == []
    assert not list(run.path.rglob("*.part"))
    expected = ("injected", "few models learn in fewer than")  # of the test's own doing: faults, and few steps
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
@pytest.mark.parametrize(
    ("place", "words", "steps"),
    [
        ("save5", SHORT, {5, 6, 7}),
        ("start", ONLY_ASKED, {1, 2}),
    ],
)
def test_wherever_it_is(runs, goes_on, place, words, steps):
    run = runs(2, words)
    assert left_well(run, run.asked(place)) in steps
    goes_on(run, whole_history=words == SHORT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_again_and_again_at_any_moment(runs, reference, tmp_path):
    """No clock of the test's decides the outcome: at worst the run has finished before it is asked."""
    run, times = runs(2, ONLY_ASKED), 0
    for delay_s in (0.1, 0.4, 0.2):
        report = tmp_path / f"report-{delay_s}"
        with stopping(run.start(HVDLAUNCH_REPORT=str(report)), tmp_path) as job:
            wait_until(lambda report=report: report.exists() and "saves" in report.read_text(), TIMEOUT_S)
            time.sleep(delay_s)
            job.send_signal(signal.SIGUSR1)
            said = ended(job, 0)
        if run.result["exit_reason"] == "finished":
            break
        left_well(run, said)
        times += 1
    else:
        run.finish()
    assert times > 0
    same_end(run, reference(2), whole_history=False)


@pytest.mark.slow
def test_before_its_first_step(runs, goes_on, tmp_path):
    run = runs(2, ONLY_ASKED)
    blocked = tmp_path / "blocked"
    with stopping(run.start(program=(str(PROGRAMS / "wait_unasked.py"), str(blocked))), tmp_path) as job:
        wait_until(lambda: blocked.exists() and len(list(blocked.iterdir())) == 2, TIMEOUT_S)
        job.send_signal(signal.SIGUSR1)
        assert left_well(run, ended(job, 0)) in (1, 2)
    goes_on(run, whole_history=False)


# --- one process without a launcher


@pytest.mark.slow
def test_one_process_saves_at_a_first_sigterm_and_at_a_first_ctrl_c(runs, goes_on):
    words = (*ONLY_ASKED, "--epochs", "1")
    run = runs(1, words)
    assert left_well(run, run.asked("step5", by=signal.SIGTERM)) in (5, 6)
    assert left_well(run, run.asked("step10", by=signal.SIGINT)) in (10, 11)
    goes_on(run, words, whole_history=False)


def test_one_process_leaves_at_once_at_a_second_one(runs):
    """It hangs, so that the first has no effect."""
    run = runs(1)
    with run.hanging("step9", saved=8) as job:
        job.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=10)
    assert job.returncode == 143
    assert run.result["exit_reason"] == "terminated"
    assert checkpoint.find_newest(run.path / "checkpoints")[0].step == 8


# --- Ctrl-C in a terminal, which goes to launchers, ranks and their loader workers alike


def typed(words, folder, keys, *, when):
    """What is seen in a terminal in which these keys are pressed while a program runs, and its status."""
    ours, its = os.openpty()
    seen = bytearray()

    def read():
        with contextlib.suppress(OSError):  # so it ends: the other side is closed
            while chunk := os.read(ours, 65536):
                seen.extend(chunk)

    job = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(folder),
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (no other thread runs yet)
    )
    os.close(its)
    reader = threading.Thread(target=read)
    reader.start()
    with stopping(job, folder):
        wait_until(lambda: when() or job.poll() is not None, TIMEOUT_S)
        os.write(ours, keys)
        status = job.wait(TIMEOUT_S)
        wait_until(lambda: not left_in(folder), 5)
    reader.join(10)
    os.close(ours)
    return seen.decode().replace("^C", "\n"), status


FOLDER = ("--data", "imagefolder", "--data-dir", "images", "--model", "efficientnet_tiny", "--workers", "1")
LONG = (*FOLDER, "--batch-size-per-rank", "4", "--epochs", "500", "--checkpoint-every-steps", "5", "--run", "r")


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_loses_no_checkpoint_and_shows_no_traceback(runs, tmp_path):
    """All ranks save and leave."""
    run = runs(2, LONG)
    one_torn_image(tmp_path / "images").unlink()
    words = argv(program=["python", *EFFNET, *LONG])
    said, status = typed(words, tmp_path, b"\x03", when=lambda: len(run.checkpoints) > 1)
    assert "Traceback" not in said
    found, passed_over = checkpoint.find_newest(run.path / "checkpoints")
    assert (found.step >= 5, passed_over) == (True, [])
    assert status == 0, said
    assert left_well(run, said) == found.step


# --- not the way to ask


@pytest.mark.slow
def test_sigterm_to_mpirun_ends_the_ranks_and_leaves_the_checkpoints(runs, goes_on, tmp_path):
    run = runs(2)
    with run.hanging("step9", saved=8) as job:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=15)
        assert job.returncode not in (0, None)
    wait_until(lambda: not left_in(tmp_path), 5)
    assert run.result["exit_reason"] == "terminated"
    found, passed_over = checkpoint.find_newest(run.path / "checkpoints")
    assert (found.step, passed_over) == (8, [])
    goes_on(run)


@pytest.mark.slow
def test_sigusr1_before_there_is_a_handler_ends_the_ranks_but_never_hangs(runs, tmp_path):
    """Without hvdlaunch, which blocks it until then."""
    run = runs(2)
    with stopping(run.start(), tmp_path) as job:
        wait_until(lambda: len(left_in(tmp_path)) == 3, TIMEOUT_S)
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=TIMEOUT_S)
        assert job.returncode != 0
        wait_until(lambda: not left_in(tmp_path), 5)
