"""Two ranks of a program under torchrun, mpirun or hvdlaunch, as a user of the environment starts them."""

import os
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.mpi.conftest import running_in

TIMEOUT_S = 240
COMMANDS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "-np", "2", "--bind-to", "none", "python"],
    "hvdlaunch": ["hvdlaunch", "run", "-np", "2", "--gpus", "none", "--allow-run-as-root", "--show", "all", "--",
                  "python"],
}  # fmt: skip
NODE = socket.gethostname().partition(".")[0]
ALLOCATION = {  # that of sbatch --ntasks=2 in its script
    "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2",
    "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": NODE, "SLURM_NODELIST": NODE,
    "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_CPUS_ON_NODE": "2", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0",
}  # fmt: skip


def environment() -> dict[str, str]:
    """That of an active .venv-peers, without another launcher's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "SLURM_", "PYTHON"))}
    return {
        **kept,
        "PATH": f"{sys.prefix}/bin:{kept['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": f"{sys.prefix}/torch_extensions",
        "MPIEXEC_TIMEOUT": str(TIMEOUT_S),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # both ranks may spawn, where two slots are full
    }


def started(folder: Path, launcher: str, *program: str, **env: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start it in this folder, with its output in the files out and err; nothing in the folder lives longer.

    Workers of torchrun have sessions of their own.
    """
    folder.mkdir(exist_ok=True)
    return running_in(folder, [*COMMANDS[launcher], *program], {**environment(), **env}, errors="err")


def status_of(folder: Path, launcher: str, *program: str, **env: str) -> int:
    """The exit status."""
    with started(folder, launcher, *program, **env) as process:
        return process.wait(float(env.get("MPIEXEC_TIMEOUT", TIMEOUT_S)) + 30)
