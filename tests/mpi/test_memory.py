"""A long run does not grow: its ranks' resident memory over many short epochs."""

import pytest

from tests.mpi.conftest import QUICK

EPOCHS, SETTLED_AFTER = 100, 20
# Without a leak -0.1 to 2.0 MiB on a busy machine (n = 6 ranks); with 0.1 MB left behind per epoch 15 and 20 MiB.
MOST_MIB = 5.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hundred_epochs_take_no_more_memory_than_twenty(run_program):
    """Of 2 steps each: every step is reported and measured, each tenth epoch saved."""
    words = [*QUICK, "--epochs", str(EPOCHS), "--batch-size-per-rank", "16", "--run", "r", "--profile"]
    words += ["--report-every-steps", "1", "--checkpoint-every-steps", "20"]
    for resident_mib in run_program("mpirun", 2, "short_epochs.py", *words, MPIEXEC_TIMEOUT="300"):
        assert len(resident_mib) == EPOCHS
        assert resident_mib[-1] - resident_mib[SETTLED_AFTER - 1] < MOST_MIB
