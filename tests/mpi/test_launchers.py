"""Launchers that know nothing of MPI: their processes do not meet, and say so."""

import subprocess
import sys

from tests.mpi.conftest import EFFNET, QUICK, TIMEOUT_S, environment


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
    assert said.count("hvdtrain: torchrun has started 2 processes that do not meet over MPI") == 1, said
    assert "with mpirun -np 2, " in said
    assert not (tmp_path / "runs").exists()
