"""A node of the Slurm allocation where ssh's host would stand: hvdlaunch and mpirun start this in place of ssh.

    python -P -m launch.probe.srun NODE COMMAND...

The command is for a shell, as ssh's is. Its step overlaps all others, and has the job's cores and GPUs of that node.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from launch.process import find

AGENT = (sys.executable, "-P", "-m", "launch.probe.srun")
# Not bound: a node may bind a task to one core, and all ranks there would be on it; launch.rank.bind binds each.
STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--input=none", "--quiet")
# What says which job it is. All else of Slurm's describes the step or the batch script that this runs in, and would
# shape the new step, as SLURM_GPUS_PER_TASK; CUDA_VISIBLE_DEVICES and how ssh came here are of this host.
OF_THE_JOB = ("SLURM_JOB_ID", "SLURM_CONF")


def inside(environment: Mapping[str, str]) -> bool:
    """Whether this runs in an allocation whose nodes srun reaches."""
    return "SLURM_JOB_ID" in environment and find("srun") is not None


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun, which it hands on to the command."""
    strange = ("SLURM_", "SLURMD_", "SRUN_", "SSH_", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in environment.items() if name in OF_THE_JOB or not name.startswith(strange)}


def main(node: str, *command: str) -> NoReturn:
    """Become the srun of a step."""
    gpus = os.environ.get("SLURM_GPUS_ON_NODE")  # else a step of one task may get what the job has for each task
    gres = [f"--gres=gpu:{gpus}"] if gpus else []
    step = ["srun", *STEP, *gres, f"--nodelist={node}", "sh", "-c", " ".join(command)]
    os.execvpe(step[0], step, step_environment(os.environ))  # noqa: S606 (that is what this file is for)


if __name__ == "__main__":
    main(*sys.argv[1:])
