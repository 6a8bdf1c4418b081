"""Faults that strike a rank: what hvdlaunch says of them, what is left on disk, and that the run goes on.

Timings are in docs/explanation/benchmarks.md. The steps of these runs take milliseconds; 12 of them are an epoch.
"""

import json
import re
import socket
from functools import cache

import pytest

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi.conftest import EFFNET, EVERY_OPTION, QUICK, end_well, program_of, slow
from tests.mpi.launched import argv, finished
from tests.refusals import require_facts

INTERVAL = 5  # steps between checkpoints
TRAIN = ["python", *EFFNET, *QUICK[:-1], "2", "--run", "r", "--checkpoint-every-steps", str(INTERVAL)]
ONE_EPOCH = ("--epochs", "1")  # the last word counts
HERE = socket.gethostname()
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


def weights(folder, ranks=2):
    """The hash of the final weights, the same on all ranks."""
    files = [run_folder(folder) / "ranks" / f"rank-{rank}.json" for rank in range(ranks)]
    (same,) = {json.loads(file.read_text())["weights_sha256"] for file in files}
    return same


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """The weights of a run that nothing happens to, by number of ranks and further options."""

    @cache
    def trained(ranks=2, *words):
        folder = tmp_path_factory.mktemp("clean")
        end_well(folder, "mpirun", ranks, [*TRAIN[1:], *words], HVDTRAIN_FAULT="")
        return weights(folder, ranks)

    return trained


KILLED = "died of signal 9 (Killed), perhaps out of memory,"


@pytest.mark.parametrize(
    ("fault", "status", "said", "saved"),
    [
        ("segv@rank1:step7", 139, "died of signal 11 (Segmentation fault) at step 7; it stood here:", 5),
        slow("exit3@rank1:step7", 3, "ended with status 3 at step 7", 5),
        slow("kill@rank1:start", 137, f"{KILLED} at the start", None),
        slow("kill@rank1:eval1", 137, f"{KILLED} at step 12", 10),
    ],
)
def test_a_rank_that_dies(tmp_path, fault, status, said, saved):
    done = finished(tmp_path, argv(program=TRAIN), HVDTRAIN_FAULT=fault)
    assert done.returncode == status, done.stderr
    assert ours(done) == [f"{RANK_1} {said}"]
    stack = words_of(tmp_path, 1)
    assert ("in string_at" in stack) if "segv" in fault else stack == ""
    assert words_of(tmp_path, 0) == ""
    assert newest(tmp_path) == saved


@pytest.mark.parametrize("ranks", ["1", slow("all")])
def test_a_rank_that_raises_leaves_its_traceback(tmp_path, ranks):
    fault = f"raise@rank{ranks}:step7"
    done = finished(tmp_path, argv(program=TRAIN), HVDTRAIN_FAULT=fault)
    assert done.returncode == 1, done.stderr
    (line,) = ours(done)
    named = re.fullmatch(
        r"hvdlaunch: error: rank ([01]) on localhost ended with status 1 at step 7; its last words:", line
    )
    assert named
    first, *trace = words_of(tmp_path, named[1]).splitlines()
    assert first == f"hvdtrain: error: rank {named[1]} on {HERE} failed at step 7: RuntimeError: injected fault {fault}"
    assert trace[0] == "Traceback (most recent call last):"
    assert ranks == "all" or named[1] == "1"
    assert newest(tmp_path) == 5


@pytest.mark.parametrize("rank", [1, slow(0)])
def test_a_rank_that_dies_while_it_saves(tmp_path, rank):
    """Of the ranks' parts of the checkpoint none is missing by then, and rank 0 may have written it or not."""
    done = finished(tmp_path, argv(program=TRAIN), HVDTRAIN_FAULT=f"kill@rank{rank}:save2")
    assert done.returncode == 137, done.stderr
    printed = "; its last words:" if rank == 0 else ""  # the end of its log: of the two it alone has printed
    assert ours(done) == [f"hvdlaunch: error: rank {rank} on localhost {KILLED} at step 10 while saving{printed}"]
    found, passed_over = checkpoint.find_newest(run_folder(tmp_path) / "checkpoints")
    assert passed_over == []
    assert found.step in (5, 10)


STOPPED = "did not arrive at step 7 (it hangs, was stopped, or its host is silent)"
HUNG = f"hung at step 7: no progress for 0:00:0{HANG_S}; it stood here:"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gil@rank1:step7", HUNG),
        ("stop@rank1:step7", STOPPED),
        slow("stop@rank0:step7", STOPPED),
        slow("sleep@rank1:start", f"hung at the start: no progress for 0:00:{10 * HANG_S}.5; it stood here:"),
    ],
)
def test_a_rank_that_hangs(tmp_path, fault, said):
    done = finished(tmp_path, argv(program=[*TRAIN, "--hang-timeout-s", str(HANG_S)]), HVDTRAIN_FAULT=fault)
    assert done.returncode == 1, done.stderr
    culprit = int(fault[fault.index("@rank") + 5])
    assert ours(done) == [f"hvdlaunch: error: rank {culprit} on localhost {said}"]
    if said == STOPPED:  # the one who waited has noticed
        assert words_of(tmp_path, 1 - culprit).startswith(f"Timeout (0:00:0{HANG_S}.500000)!")
    else:
        assert words_of(tmp_path, culprit).startswith("Timeout (0:00:")
        assert "faults.py" in done.stderr.partition("it stood here:")[2]
    assert newest(tmp_path) == (None if "start" in fault else 5)


@pytest.mark.slow
def test_all_ranks_hang_at_the_same_step(tmp_path):
    program = [*TRAIN, "--hang-timeout-s", str(HANG_S)]
    done = finished(tmp_path, argv(program=program), HVDTRAIN_FAULT="sleep@rankall:step7")
    assert done.returncode == 1, done.stderr
    (line,) = ours(done)
    assert re.fullmatch(rf"hvdlaunch: error: rank [01] on localhost {HUNG}", line)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "step"), [("save1", 5), ("eval1", 12)])
def test_the_rank_that_is_stopped_in_a_save_or_an_evaluation_is_named(tmp_path, place, step):
    """In a save the others wait within its limit, which is longer than a step's."""
    program = [*TRAIN, "--hang-timeout-s", str(HANG_S)]
    done = finished(tmp_path, argv(program=program), HVDTRAIN_FAULT=f"stop@rank0:{place}")
    assert done.returncode == 1, done.stderr
    late = f"did not arrive at step {step} (it hangs, was stopped, or its host is silent)"
    [line] = ours(done)
    # In an evaluation it may be stopped where its last note is that it waits, as the others do.
    deadlock = f"all ranks are waiting in a collective, rank 1 on localhost at step {step}"
    assert line == f"hvdlaunch: error: rank 0 on localhost {late}" or (place == "eval1" and deadlock in line)
    timeout = 10 * HANG_S if place == "save1" else HANG_S
    assert words_of(tmp_path, 1).startswith(f"Timeout (0:00:{timeout:02}.500000)!")


@pytest.mark.slow
def test_the_run_outlives_a_save_that_takes_longer_than_a_step_may(tmp_path):
    """The thread of rank 0 that writes is stopped with it; it goes on before the limit of a save."""
    slow_disk = program_of(
        tmp_path,
        EVERY_OPTION + "import runpy, time\n"
        "from hvdtrain.checkpoint import files as checkpoint\n"
        "def commit(*arguments, original=checkpoint.commit, **more):\n"
        f"    time.sleep({2 * HANG_S})\n"
        "    return original(*arguments, **more)\n"
        "checkpoint.commit = commit\n"
        "runpy.run_module('hvdtrain.effnet', run_name='__main__')\n",
    )
    words = [*TRAIN[len(EFFNET) + 1 :], *ONE_EPOCH, "--hang-timeout-s", str(HANG_S)]
    done = finished(tmp_path, argv(program=["python", slow_disk, *words]))
    assert done.returncode == 0, done.stderr
    assert newest(tmp_path) == 12


def test_a_flipped_bit_ends_the_run_with_status_4(tmp_path):
    program = [*TRAIN, "--check-replicas-every", "1"]
    done = finished(tmp_path, argv(program=program), HVDTRAIN_FAULT="bitflip@rank1:step7")
    assert done.returncode == 4, done.stderr
    assert ours(done) == []
    said = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: error: replicas differ")]
    assert len(said) == 1
    require_facts(said[0], "after step 7: rank 1 ... features.0.0.")
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["exit_reason"] == "replicas differ"
    assert newest(tmp_path) == 5


@pytest.mark.slow
def test_a_nan_on_one_rank_is_skipped_by_all(tmp_path):
    done = finished(tmp_path, argv(program=[*TRAIN, *ONE_EPOCH]), HVDTRAIN_FAULT="nan@rank1:step7")
    assert done.returncode == 0, done.stderr
    assert "step 7: skipped on all ranks, NaN or Inf in the loss of rank 1" in done.stderr + done.stdout
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert (result["exit_reason"], result["steps"], result["skipped_steps"]) == ("finished", 12, 1)


@pytest.mark.slow
def test_a_spike_on_one_rank_is_skipped_by_all(tmp_path):
    words = [*TRAIN, "--on-spike", "skip"]
    done = finished(tmp_path, argv(program=words), HVDTRAIN_FAULT="spike@rank1:step20")
    assert done.returncode == 0, done.stderr
    assert "step 20: skipped on all ranks, the loss spiked from about " in done.stderr + done.stdout
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert (result["exit_reason"], result["steps"], result["skipped_steps"]) == ("finished", 24, 1)
    assert weights(tmp_path)  # the same on both


PLAIN = (2, *ONE_EPOCH)  # ranks, options


@pytest.mark.parametrize(
    ("fault", "why", "setting"),
    [
        ("kill@rank1:step7", f"{KILLED} at step 7", PLAIN),
        # How each end is noticed is tested above; the restart behind it is the same.
        slow("stop@rank1:step7", STOPPED, PLAIN),
        slow("kill@rank1:eval1", f"{KILLED} at step 12", (2,)),
        slow("kill@rank1:step7", f"{KILLED} at step 7", (3, "--deterministic", *ONE_EPOCH)),
    ],
)
def test_it_is_started_again_and_ends_with_the_weights_of_a_clean_run(tmp_path, clean, fault, why, setting):
    ranks, *words = setting
    program = [*TRAIN, *words, "--hang-timeout-s", str(HANG_S)]
    done = finished(tmp_path, argv("--restarts", "1", "-np", str(ranks), program=program), HVDTRAIN_FAULT=fault)
    assert done.returncode == 0, done.stderr
    lost_to = 10 if "eval1" in fault else 5
    again = f"hvdlaunch: warning: restart 1 of 1 after: rank 1 on localhost {why}; {ranks} ranks on localhost:{ranks}, "
    assert ours(done)[-1] == f"{again}from step {lost_to}"
    assert "resumed from runs/effnet/r/checkpoints/step-" in done.stdout + done.stderr
    assert weights(tmp_path, ranks) == clean(*setting)
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    per_epoch = {2: 12, 3: 8}[ranks]
    assert (result["exit_reason"], result["steps"]) == ("finished", per_epoch * result["epochs"])
    told = [json.loads(line) for line in (run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in told if "epoch" not in line]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_replicas_that_differ_go_on_from_a_checkpoint_before(tmp_path, clean):
    program = [*TRAIN, *ONE_EPOCH, "--check-replicas-every", "1"]
    done = finished(tmp_path, argv("--restarts", "1", program=program), HVDTRAIN_FAULT="bitflip@rank1:step7")
    assert done.returncode == 0, done.stderr
    assert ours(done)[-1].startswith(
        "hvdlaunch: warning: restart 1 of 1 after: hvdtrain: error: replicas differ after step 7: rank 1"
    )
    assert ours(done)[-1].endswith("from step 5")
    assert weights(tmp_path) == clean(*PLAIN)


@pytest.mark.slow
def test_three_restarts_without_a_new_checkpoint_end_it_with_status_5(tmp_path):
    """The fault comes back with each attempt, as a broken machine's."""
    wrong = program_of(
        tmp_path,
        "import os, runpy\n"
        "os.environ['HVDLAUNCH_ATTEMPT'] = '0'\n"
        "runpy.run_module('hvdtrain.effnet', run_name='__main__')\n",
    )
    program = ["python", wrong, *TRAIN[len(EFFNET) + 1 :]]
    done = finished(tmp_path, argv("--restarts", "9", program=program), HVDTRAIN_FAULT="kill@rank1:step7")
    assert done.returncode == 5, done.stderr
    assert [line.partition(" after")[0] for line in ours(done) if "restart " in line] == [
        *(f"hvdlaunch: warning: restart {number} of 9" for number in (1, 2, 3)),
    ]
    assert (
        ours(done)[-1]
        == "hvdlaunch: error: 3 restarts in a row made no progress (no new checkpoint): giving up with status 5"
    )
