"""--compression powersgd:R through the real program."""

import pytest

from tests.mpi.interrupted import TINY, same_end

POWER = (*TINY, "--images=768", "--batch-size-per-rank", "64", "--epochs", "1", "--compression", "powersgd:2")
POWER = (*POWER, "--checkpoint-every-steps", "3", "--check-replicas-every", "2")  # 6 steps


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(runs, reference):
    run = runs(2, POWER)
    run.killed("step5", saved=3)
    run.finish()
    same_end(run, reference(2, POWER))
