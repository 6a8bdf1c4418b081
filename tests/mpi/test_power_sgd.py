"""--compression powersgd:R through the real program."""

import pytest

from tests.mpi.conftest import EFFNET
from tests.mpi.interrupted import TINY, refusal, same_end
from tests.refusals import require_facts

POWER = (*TINY, "--images=768", "--batch-size-per-rank", "64", "--epochs", "1", "--compression", "powersgd:2")
POWER = (*POWER, "--checkpoint-every-steps", "3", "--check-replicas-every", "2")  # 6 steps


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(runs, reference):
    run = runs(2, POWER)
    run.killed("step5", saved=3)
    run.finish()
    same_end(run, reference(2, POWER))


def test_matrices_that_would_be_larger_than_the_gradients_are_refused(run, tmp_path):
    done = run("python", 1, [*EFFNET, *TINY, "--compression", "powersgd:999"])
    assert done.returncode == 2
    require_facts(refusal(done.stderr), "--compression powersgd:999: ... at most powersgd:")
    assert not (tmp_path / "runs").exists()
