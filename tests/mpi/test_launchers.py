"""What launchers start and should not: processes that do not meet, and more than fit a host."""

import subprocess
import sys

import pytest

from tests.mpi.conftest import EFFNET, QUICK, TIMEOUT_S, command, environment
from tests.mpi.forks import BY_ITSELF

pytestmark = pytest.mark.slow


def test_torchruns_ranks_are_refused_and_train_nothing(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *EFFNET, *QUICK],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert said.count("hvdtrain: error: torchrun started 2 independent processes") == 1, said
    assert "mpirun -np 2, " in said
    assert not (tmp_path / "runs").exists()


def test_more_ranks_than_fit_a_host_all_leave_and_one_says_why(tmp_path):
    many = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=10000000", sys.executable, "-m", "hvdtrain.effnet"]
    done = subprocess.run(
        [*command("mpirun", 3, [])[:-1], *many],
        cwd=tmp_path,
        env={**environment(tmp_path), **BY_ITSELF},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("ranks need 3500000.0 GB of memory for their imports alone") == 1, done.stderr
    assert "Traceback" not in done.stderr
