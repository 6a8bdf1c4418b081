"""A long run does not grow: its ranks' resident memory over many short epochs."""

import itertools
import statistics

import pytest

from tests.mpi.conftest import QUICK

EPOCHS, SETTLED_AFTER = 50, 20
# The median growth of 10 epochs: 0.1 MiB at most without a leak, beside single steps of up to 5 MiB on a busy machine
# (n = 3 ranks). With 0.1 MB left behind per epoch it would be 1.
MOST_MIB = 0.5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fifty_epochs_take_no_more_memory_than_twenty(run_program):
    """Of 2 steps each: every step is reported and measured, each tenth epoch saved."""
    words = [*QUICK, "--epochs", str(EPOCHS), "--batch-size-per-rank", "16", "--run", "r", "--profile"]
    words += ["--report-every-steps", "1", "--checkpoint-every", "20steps"]
    for resident_mib in run_program("mpirun", 2, "short_epochs.py", *words, MPIEXEC_TIMEOUT="300"):
        assert len(resident_mib) == EPOCHS
        grown = [after - before for before, after in itertools.pairwise(resident_mib[SETTLED_AFTER - 1 :: 10])]
        assert statistics.median(grown) < MOST_MIB
