"""Replicas of several ranks, in groups or with gradients that travel as small matrices."""

import pytest

from tests.mpi.interrupted import TINY, same_end
from tests.mpi.test_bert import EXACT, difference, exported
from tests.mpi.test_stages import assert_same_end, ended

__all__ = ["ended"]  # a fixture
pytestmark = pytest.mark.slow

FEW = (*TINY, "--images=512")  # 8 steps
LOCAL = ("--sync", "local:5/1")
POWER = ("--compression", "powersgd:2")

BATCHES = ("--batch-size-per-rank", "16", "--accumulate-steps", "2", "--clip-norm", "0.5")
BATCHES = (*BATCHES, "--check-replicas-every", "2")
STAGES = (*BATCHES, "--stages", "0,4")  # another cut would give PowerSGD other matrices


def test_two_replicas_of_stages_give_the_bits_of_two_ranks(ended):
    assert_same_end(ended(4, *STAGES, *LOCAL), ended(2, *BATCHES, *LOCAL))


def test_a_nan_is_skipped_by_the_replicas_that_step_together_and_named(runs):
    run = runs(4, (*FEW, *STAGES, "--epochs", "1", *LOCAL))
    said = run.finish(HVDTRAIN_FAULT="nan@rank3:step1,nan@rank0:step6")
    assert [line for line in said.splitlines() if " skipped on " in line] == [
        "hvdtrain: warning: step 1: skipped on ranks 2 to 3, NaN or Inf in the loss of stage 1 of rank 3",
        "hvdtrain: warning: step 6: skipped on ranks 0 to 1, NaN or Inf in the forward pass of stage 0 of rank 0",
    ]
    assert run.result["skipped_steps"] == 2
    assert len(run.weights) == 1


LONG_POWER = pytest.param(POWER, 0, marks=pytest.mark.long)  # two minutes; matrices are saved and restored below too


@pytest.mark.parametrize(("way", "rank"), [(LOCAL, 3), LONG_POWER])
def test_a_run_that_lost_a_rank_goes_on_with_the_same_bits(runs, reference, way, rank):
    """With dropout. Groups that step apart are saved where they meet."""
    words = (*FEW, *STAGES, "--epochs", "1", *way, "--checkpoint-every", "5steps", "--report-every-steps", "3")
    run = runs(4, words)
    run.killed("step7", saved=5, rank=rank)
    run.finish()
    same_end(run, reference(4, words), whole_history=False)
    assert run.result["resumed"] == 1


def test_what_matrices_left_out_is_not_taken_over_by_other_parts(runs):
    run = runs(4, (*FEW, *STAGES, "--epochs", "1", *POWER, "--checkpoint-every", "4steps"))
    run.killed("step5", saved=4)
    then = runs(2, (*FEW, *BATCHES, "--epochs", "1", *POWER))
    assert "resumed from runs/effnet/r/checkpoints/step-000000004, epoch 1" in then.finish()
    assert len(then.weights) == 1


def test_two_replicas_of_slices_give_the_weights_of_two_ranks(tmp_path):
    """Sums inside layers are taken in another order."""
    words = [*EXACT, "--global-batch-size", "8", "--max-steps", "9", "--clip-norm", "0.5", *LOCAL]
    whole = exported(tmp_path / "whole", 2, words)
    sliced = exported(tmp_path / "sliced", 4, [*words, "--tensor", "2", "--check-replicas-every", "1"])
    assert difference(sliced, whole) < 1e-6
