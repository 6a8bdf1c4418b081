"""--compression powersgd:R through the real programs."""

from tests.mpi.conftest import EFFNET
from tests.mpi.interrupted import TINY, refusal, same_end

POWER = (*TINY, "--batch-size-per-rank", "64", "--epochs", "1", "--compression", "powersgd:2")
POWER = (*POWER, "--checkpoint-every-steps", "5", "--check-replicas-every", "2")


def test_a_killed_run_goes_on_with_the_same_bits(runs, reference):
    run = runs(2, POWER)
    run.killed("step8", saved=5)
    run.finish()
    same_end(run, reference(2, POWER))


def test_a_step_that_is_not_finite_leaves_no_trace(runs):
    run = runs(2, POWER)
    said = run.finish(HVDTRAIN_FAULT="nan@rank1:step1,nan@rank1:step6")
    assert "step 6: skipped on all ranks, NaN or Inf in the loss of rank 1" in said
    assert run.result["skipped_steps"] == 2
    assert len(run.weights) == 1


def test_a_wrong_choice_is_one_line(run, tmp_path):
    done = run("mpirun", 2, [*EFFNET, *TINY, "--runs-dir", str(tmp_path), "--compression", "powersgd:999"])
    assert done.returncode == 2
    line = "hvdtrain: --compression powersgd:999 makes no gradient of this model half as large: give at most "
    assert refusal(done.stderr).startswith(line)
    assert not list(tmp_path.iterdir())
