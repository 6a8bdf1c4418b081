"""--compression powersgd:R through the real programs."""

import pytest

from tests.mpi.conftest import EFFNET, slow
from tests.mpi.interrupted import TINY, same_end
from tests.refusals import require_facts

POWER = (*TINY, "--images=768", "--batch-size-per-rank", "64", "--epochs", "1", "--compression", "powersgd:2")
POWER = (*POWER, "--checkpoint-every-steps", "3", "--check-replicas-every", "2")  # 6 steps


def test_a_killed_run_goes_on_with_the_same_bits(runs, reference):
    run = runs(2, POWER)
    run.killed("step5", saved=3)
    run.finish()
    same_end(run, reference(2, POWER))


def test_a_step_that_is_not_finite_leaves_no_trace(runs):
    run = runs(2, POWER)
    said = run.finish(HVDTRAIN_FAULT="nan@rank1:step1,nan@rank1:step6")
    assert "step 6: skipped on all ranks, NaN or Inf in the loss of rank 1" in said
    assert run.result["skipped_steps"] == 2
    assert len(run.weights) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["powersgd:999"], "--compression powersgd:999: ... at most powersgd:"),
        slow(["powersgd"], "--compression powersgd: ... none, fp16 or powersgd:R"),
        slow(["powersgd:2", "--precision", "fp16"], "--compression powersgd:2 does not work with --precision fp16: "),
    ],
)
def test_a_wrong_choice_is_one_line(run, tmp_path, words, line):
    done = run("mpirun", 2, [*EFFNET, *TINY, "--runs-dir", str(tmp_path), "--compression", *words])
    assert done.returncode == 2
    (said,) = [one for one in done.stderr.splitlines() if one.startswith("hvdtrain: ")]
    require_facts(said, f"hvdtrain: error: {line}")
    assert not list(tmp_path.iterdir())
