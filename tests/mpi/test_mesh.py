"""Replicas of several ranks, in groups or with gradients that travel as small matrices."""

import math

import pytest
from safetensors.torch import load_file

from tests import texts
from tests.mpi.conftest import BERT, EFFNET, end_well, slow
from tests.mpi.interrupted import TINY, Runs, refusal, same_end
from tests.mpi.test_bert import INTERRUPTED, WORDS, difference
from tests.mpi.test_stages import EPOCH, assert_same_end, ended, result

__all__ = ["ended"]  # a fixture

FEW = (*TINY, "--images=768")
TWO_LEVEL = ("--sync", "two-level", "--sync-group-size", "1")
LOCAL = ("--sync", "local", "--sync-every", "5", "--sync-group-size", "1")
POWER = ("--compression", "powersgd:2")
WAYS = {"two-level": TWO_LEVEL, "local": LOCAL, "powersgd": POWER}

BATCHES = ("--batch-size-per-rank", "16", "--accumulate-steps", "2", "--clip-norm", "0.5")
BATCHES = (*BATCHES, "--check-replicas-every", "2")
STAGES = (*BATCHES, "--stages", "2", "--stages-at", "4")  # another cut would give PowerSGD other matrices


@pytest.mark.slow
@pytest.mark.parametrize("way", ["two-level", "local"])
def test_two_replicas_of_stages_give_the_bits_of_two_ranks(ended, way):
    assert_same_end(ended(4, *STAGES, *WAYS[way]), ended(2, *BATCHES, *WAYS[way]))


@pytest.mark.slow
def test_matrices_of_stages_learn_as_those_of_whole_models(ended):
    """Each stage begins with random matrices of its own: the bits are others."""
    whole, cut, exact = (result(ended(*one)) for one in ((2, *BATCHES, *POWER), (4, *STAGES, *POWER), (2, *BATCHES)))
    assert cut["eval_loss"] != exact["eval_loss"]
    assert cut["eval_loss"] == pytest.approx(whole["eval_loss"], abs=0.15)
    assert math.isfinite(cut["eval_loss"])


LAST = "NaN or Inf in the loss of stage 1 of rank 3"
FIRST = "NaN or Inf in the forward pass of stage 0 of rank 0"


@pytest.mark.parametrize(
    ("way", "of_last", "of_first"),
    [
        ("local", "ranks 2 to 3", "ranks 0 to 1"),
        slow("two-level", "all ranks", "all ranks"),
    ],
)
def test_a_nan_is_skipped_by_the_replicas_that_step_together_and_named(runs, way, of_last, of_first):
    run = runs(4, (*FEW, *STAGES, "--batch-size-per-rank", "32", "--epochs", "1", *WAYS[way]))
    said = run.finish(HVDTRAIN_FAULT="nan@rank3:step1,nan@rank0:step6")
    skipped = [line for line in said.splitlines() if " skipped on " in line]
    said = [f"step 1: skipped on {of_last}, {LAST}", f"step 6: skipped on {of_first}, {FIRST}"]
    assert skipped == [f"hvdtrain: warning: {line}" for line in said]
    assert run.result["skipped_steps"] == 2
    assert len(run.weights) == 1


@pytest.mark.slow
def test_a_group_of_stages_that_skips_too_many_steps_ends_the_run_where_all_meet(runs):
    run = runs(4, (*FEW, *STAGES, "--epochs", "1", *LOCAL, "--max-skipped-steps", "3"))
    run.finish(status=3, HVDTRAIN_FAULT=",".join(f"nan@rank2:step{step}" for step in range(6, 13)))
    assert (run.result["exit_reason"], run.result["steps"]) == ("too many skipped steps", 10)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "rank"), [("two-level", 0), ("local", 3), ("powersgd", 0)])
def test_a_run_that_lost_a_rank_goes_on_with_the_same_bits(runs, reference, way, rank):
    """With dropout. Groups that step apart are saved where they meet."""
    words = (*FEW, *STAGES, "--epochs", "1", *WAYS[way], "--checkpoint-every-steps", "4", "--report-every-steps", "3")
    run = runs(4, words)
    run.killed("step11", saved=10 if way == "local" else 8, rank=rank)
    steps = [int(name.removeprefix("step-")) for name in run.checkpoints]
    assert all(step % (5 if way == "local" else 4) == 0 for step in steps)
    run.finish()
    same_end(run, reference(4, words), whole_history=False)
    assert run.result["resumed"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), [(4, (*STAGES[:-1], "3")), (2, BATCHES), (2, STAGES)])
def test_what_matrices_left_out_is_not_taken_over_by_other_parts(runs, ranks, words):
    run = runs(4, (*FEW, *STAGES, "--epochs", "1", *POWER, "--checkpoint-every-steps", "4"))
    run.killed("step9", saved=8)
    then = runs(ranks, (*FEW, *words, "--epochs", "1", *POWER))
    assert "resumed from runs/effnet/r/checkpoints/step-000000008, epoch 1" in then.finish()
    assert len(then.weights) == 1


SLICED = (*INTERRUPTED, "--tensor", "2", "--check-replicas-every", "1", "--max-steps", "9")


def exported(folder, ranks, words):
    """The weights of a BERT after 9 steps."""
    folder.mkdir()
    texts.put(folder / "texts")
    given = [*BERT, *WORDS, "--global-batch-size", "8", "--max-steps", "9", "--dropout", "0", "--export", "model"]
    end_well(folder, "mpirun", ranks, [*given, *words, "--optimizer", "sgd", "--lr", "0.5", "--clip-norm", "0.5"])
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["two-level", "local"])
def test_two_replicas_of_slices_give_the_weights_of_two_ranks(tmp_path, way):
    """Sums inside layers are taken in another order."""
    whole = exported(tmp_path / "whole", 2, WAYS[way])
    sliced = exported(tmp_path / "sliced", 4, (*WAYS[way], "--tensor", "2", "--check-replicas-every", "1"))
    assert difference(sliced, whole) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["local", "powersgd"])
def test_slices_that_were_killed_end_as_if_they_had_not_been(tmp_path, tmp_path_factory, way):
    words = (*SLICED, *WAYS[way])
    whole, broken = (
        Runs(folder=folder, ranks=4, words=words, script="bert") for folder in (tmp_path_factory.mktemp("w"), tmp_path)
    )
    for run in (whole, broken):
        texts.put(run.folder / "texts")
    whole.finish()
    broken.killed("step7", saved=5 if way == "local" else 6)
    said = broken.finish(HVDTRAIN_FAULT="")
    assert "resumed from" in said
    same_end(broken, whole, whole_history=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["local", "two-level"])
def test_a_nan_of_one_slice_is_skipped_and_named(tmp_path, way):
    texts.put(tmp_path / "texts")
    run = Runs(folder=tmp_path, ranks=4, words=(*SLICED, *WAYS[way]), script="bert")
    where = "ranks 2 to 3" if way == "local" else "all ranks"
    said = run.finish(HVDTRAIN_FAULT="nan@rank3:step2")
    assert f"step 2: skipped on {where}, NaN or Inf in the loss of slice 1 of rank 3" in said
    assert run.result["skipped_steps"] == 1
    assert len(run.weights) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        slow((*STAGES, *LOCAL[:-1], "2"), "--sync-group-size 2: 2 replicas"),
        slow((*STAGES, "--sync", "two-level"), "--sync: all 4 ranks are on "),
        slow((*STAGES, "--compression", "powersgd:999"), "--compression powersgd:999: "),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(run, tmp_path, words, line):
    done = run("mpirun", 4, [*EFFNET, *EPOCH, *words, "--run", "r"])
    assert done.returncode == 2
    assert line in refusal(done.stdout + done.stderr)
    assert not (tmp_path / "runs").exists()
