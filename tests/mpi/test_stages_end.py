"""Replicas of stages that are interrupted, as hvdlaunch and checkpoints see them."""

import json
import re
import sys

import pytest

from tests import texts
from tests.mpi.conftest import EFFNET, slow
from tests.mpi.interrupted import TINY, Runs, same_end
from tests.mpi.launched import argv, finished, lines
from tests.mpi.test_bert import INTERRUPTED
from tests.mpi.test_stages import CUTS
from tests.refusals import require_facts

STAGES = ("--stages", "2", *CUTS["2"], "--batch-size-per-rank", "16", "--accumulate-steps", "4", "--epochs", "1")
TRAIN = [sys.executable, *EFFNET, *TINY, *STAGES, "--dropout", "0", "--deterministic", "--run", "r"]
GROUPS = ("-np", "4", "--ranks-per-replica", "2")


def test_the_launchers_groups_must_be_the_stages(tmp_path):
    done = finished(tmp_path, argv("-np", "4", program=TRAIN))
    assert done.returncode == 2
    [line] = lines(done)
    require_facts(line, "hvdtrain: error: --stages 2: ... without --ranks-per-replica ... --ranks-per-replica 2")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sleep@rank1:step7", "hung at step 7: no progress for 0:00:08; it stood here:"),
        slow("stop@rank2:step7", "did not arrive at step 7 (it hangs, was stopped, or its host is silent)"),
    ],
)
def test_the_stage_that_keeps_the_others_waiting_is_named(tmp_path, fault, said):
    done = finished(tmp_path, argv(*GROUPS, program=[*TRAIN, "--hang-timeout-s", "8"]), HVDTRAIN_FAULT=fault)
    assert done.returncode != 0
    assert f"hvdlaunch: error: rank {fault[fault.index('@rank') + 5]} on localhost {said}" in lines(done)


@pytest.mark.slow
def test_a_replica_that_does_not_come_to_the_sums_is_ended_by_the_watchdog(tmp_path):
    """All its stages sleep, so that those of the other come to Horovod's sums, each among its own replicas."""
    asleep = "sleep@rank2:step7,sleep@rank3:step7"
    done = finished(tmp_path, argv(*GROUPS, program=[*TRAIN, "--hang-timeout-s", "8"]), HVDTRAIN_FAULT=asleep)
    assert done.returncode != 0
    hung = r"hvdlaunch: error: rank [23] on localhost hung at step 7: no progress for 0:00:08; it stood here:"
    assert any(re.fullmatch(hung, line) for line in lines(done))


@pytest.mark.slow
def test_a_run_that_is_started_again_ends_as_if_nothing_had_been(tmp_path):
    folders = [tmp_path / "broken", tmp_path / "whole"]
    for folder, fault in zip(folders, ("kill@rank2:step7", ""), strict=True):
        folder.mkdir()
        program = [*TRAIN, "--checkpoint-every-steps", "5"]
        done = finished(folder, argv(*GROUPS, "--restarts", "1", program=program), HVDTRAIN_FAULT=fault)
        assert done.returncode == 0, done.stderr
    broken, whole = (json.loads((folder / "runs/effnet/r/result.json").read_text()) for folder in folders)
    assert (broken["resumed"], whole["resumed"]) == (1, 0)
    assert broken["eval_loss"] == whole["eval_loss"]
    hashes = [
        json.loads(file.read_text())["weights_sha256"]
        for folder in folders
        for file in folder.glob("runs/effnet/r/ranks/rank-?.json")
    ]
    assert (len(hashes), len(set(hashes))) == (8, 1)


@pytest.mark.slow
def test_a_bert_in_stages_that_was_killed_ends_as_if_it_had_not_been(tmp_path, tmp_path_factory):
    """With dropout: each rank goes on with its own random numbers."""
    words = (*INTERRUPTED, "--stages", "2", "--task", "mlm")
    whole, broken = (Runs(folder=folder, ranks=2, words=words, script="bert") for folder in
                     (tmp_path_factory.mktemp("whole"), tmp_path))  # fmt: skip
    for run in (whole, broken):
        texts.put(run.folder / "texts")
    whole.finish()
    broken.killed("step3", saved=2)
    broken.finish()
    same_end(broken, whole)
    assert broken.result["resumed"] == 1
