"""Faults that strike a rank: what hvdlaunch says of them, what is left on disk, and that the run goes on.

Timings are in docs/explanation/benchmarks.md. The steps of these runs take milliseconds; 12 of them are an epoch.
"""

import json
import socket

import pytest

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi.conftest import EFFNET, EVERY_OPTION, QUICK, end_well, program_of, slow
from tests.mpi.launched import argv, finished
from tests.refusals import require_facts

INTERVAL = 5  # steps between checkpoints
TRAIN = ["python", *EFFNET, *QUICK[:-1], "2", "--run", "r", "--checkpoint-every", f"{INTERVAL}steps"]
ONE_EPOCH = ("--epochs", "1")  # the last word counts
RANK_1 = "hvdlaunch: error: rank 1 on localhost"
HANG_S = 2  # for --hang-timeout-s; a first step, a save or an evaluation may take ten times as long


def run_folder(folder):
    return folder / "runs" / "effnet" / "r"


def ours(done):
    """The lines of hvdlaunch itself, without the tail of an error file and the remark on CPUs."""
    return [one for one in done.stderr.splitlines() if one.startswith("hvdlaunch: ") and "--gpus none" not in one]


def words_of(folder, rank):
    """What the rank's error file holds."""
    return (run_folder(folder) / "ranks" / f"rank-{rank}.err").read_text()


def newest(folder):
    """The newest checkpoint's step; none is damaged, and nothing lies half-written beside them."""
    found, passed_over = checkpoint.find_newest(run_folder(folder) / "checkpoints")
    assert passed_over == []
    assert not list((run_folder(folder) / "checkpoints").glob(".*"))
    return found and found.step


def weights(folder):
    """The hash of the final weights, the same on all ranks."""
    [same] = {json.loads(file.read_text())["weights_sha256"] for file in run_folder(folder).glob("ranks/rank-*.json")}
    return same


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """The weights of a run of one epoch that nothing happens to."""
    folder = tmp_path_factory.mktemp("clean")
    end_well(folder, "mpirun", 2, [*TRAIN[1:], *ONE_EPOCH], HVDTRAIN_FAULT="")
    return weights(folder)


KILLED = "died of signal 9 (Killed), perhaps out of memory,"


def test_a_rank_that_dies_leaves_its_stack(tmp_path):
    done = finished(tmp_path, argv(program=TRAIN), HVDTRAIN_FAULT="segv@rank1:step7")
    assert done.returncode == 139, done.stderr
    assert ours(done) == [f"{RANK_1} died of signal 11 (Segmentation fault) at step 7; it stood here:"]
    assert "in string_at" in words_of(tmp_path, 1)
    assert words_of(tmp_path, 0) == ""
    assert newest(tmp_path) == 5


def test_a_rank_that_raises_leaves_its_traceback(tmp_path):
    fault = "raise@rank1:step7"
    done = finished(tmp_path, argv(program=TRAIN), HVDTRAIN_FAULT=fault)
    assert done.returncode == 1, done.stderr
    assert ours(done) == [f"{RANK_1} ended with status 1 at step 7; its last words:"]
    first, *trace = words_of(tmp_path, 1).splitlines()
    here = socket.gethostname()
    assert first == f"hvdtrain: error: rank 1 on {here} failed at step 7: RuntimeError: injected fault {fault}"
    assert trace[0] == "Traceback (most recent call last):"
    assert newest(tmp_path) == 5


def test_rank_0_dies_while_it_saves(tmp_path):
    """Of the ranks' parts of the checkpoint none is missing by then, and rank 0 may have written it or not."""
    done = finished(tmp_path, argv(program=TRAIN), HVDTRAIN_FAULT="kill@rank0:save2")
    assert done.returncode == 137, done.stderr
    # the end of its log: of the two it alone has printed
    assert ours(done) == [f"hvdlaunch: error: rank 0 on localhost {KILLED} at step 10 while saving; its last words:"]
    found, passed_over = checkpoint.find_newest(run_folder(tmp_path) / "checkpoints")
    assert passed_over == []
    assert found.step in (5, 10)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gil@rank1:step7", f"hung at step 7: no progress for 0:00:0{HANG_S}; "),
        slow("stop@rank1:step7", "did not arrive at step 7 (it hangs, was stopped, or its host is silent)"),
    ],
)
def test_a_rank_that_hangs(tmp_path, fault, said):
    done = finished(tmp_path, argv(program=[*TRAIN, "--hang-timeout-s", str(HANG_S)]), HVDTRAIN_FAULT=fault)
    assert done.returncode == 1, done.stderr
    [line] = ours(done)
    require_facts(line, f"{RANK_1} {said} ... rank 1 is outside of hvdtrain's calls ... rank 0 waits in ")
    if "stop" in fault:  # the one who waited has noticed
        assert words_of(tmp_path, 0).startswith(f"Timeout (0:00:0{HANG_S}.500000)!")
    else:
        assert words_of(tmp_path, 1).startswith("Timeout (0:00:")
        assert "faults.py" in done.stderr.partition("it stood here:")[2]
    assert newest(tmp_path) == 5


@pytest.mark.slow
def test_the_run_outlives_a_save_that_takes_longer_than_a_step_may(tmp_path):
    """The thread of rank 0 that writes is stopped with it; it goes on before the limit of a save."""
    limit_s = 2 * HANG_S  # no step of a busy machine takes as long
    slow_disk = program_of(
        tmp_path,
        EVERY_OPTION + "import runpy, time\n"
        "from hvdtrain.checkpoint import files as checkpoint\n"
        "def commit(*arguments, original=checkpoint.commit, **more):\n"
        f"    time.sleep({2 * limit_s})\n"
        "    return original(*arguments, **more)\n"
        "checkpoint.commit = commit\n"
        "runpy.run_module('hvdtrain.effnet', run_name='__main__')\n",
    )
    words = [*TRAIN[len(EFFNET) + 1 :], *ONE_EPOCH, "--hang-timeout-s", str(limit_s), "--checkpoint-every", "10steps"]
    done = finished(tmp_path, argv(program=["python", slow_disk, *words]))
    assert done.returncode == 0, done.stderr
    assert newest(tmp_path) == 12


def test_a_flipped_bit_ends_the_run_with_status_4(tmp_path):
    program = [*TRAIN, "--check-replicas-every", "1"]
    done = finished(tmp_path, argv(program=program), HVDTRAIN_FAULT="bitflip@rank1:step7")
    assert done.returncode == 4, done.stderr
    assert ours(done) == []
    [said] = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: error: replicas differ")]
    require_facts(said, "after step 7: rank 1 ... features.0.0.")
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["exit_reason"] == "replicas differ"
    assert newest(tmp_path) == 5


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kill@rank1:step7", f"rank 1 on localhost {KILLED} at step 7; 2 ranks on localhost:2, "),
        slow("bitflip@rank1:step7", "hvdtrain: error: replicas differ after step 7: rank 1"),
    ],
)
def test_it_is_started_again_and_ends_with_the_weights_of_a_clean_run(tmp_path, clean, fault, why):
    program = [*TRAIN, *ONE_EPOCH, "--check-replicas-every", "1"]
    done = finished(tmp_path, argv("--restarts", "1", program=program), HVDTRAIN_FAULT=fault)
    assert done.returncode == 0, done.stderr
    assert ours(done)[-1].startswith(f"hvdlaunch: warning: restart 1 of 1 after: {why}")
    assert ", from step 5" in ours(done)[-1]
    assert "resumed from runs/effnet/r/checkpoints/step-" in done.stdout + done.stderr
    assert weights(tmp_path) == clean
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert (result["exit_reason"], result["steps"]) == ("finished", 12)
    told = [json.loads(line) for line in (run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in told if not {"epoch", "event"} & line.keys()]
    assert steps == sorted(set(steps))
