"""Reaches a node of the Slurm allocation: hvdlaunch and mpirun start this program instead of ssh.

    python -P -m launch.hosts.srun NODE COMMAND...

The command is interpreted by a shell, like ssh's. Its step overlaps all others, and has the job's cores and GPUs on
that node.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from launch.errors import ProcessError
from launch.hosts.slurm import gpus_in_details, read_allocation
from launch.machine.nvidia import VISIBLE
from launch.process import ask, find

AGENT = (sys.executable, "-P", "-m", "launch.hosts.srun")
# Not bound: otherwise a node may bind the task, and so all its ranks, to one core; bind binds each rank.
STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--input=none", "--quiet")
SCONTROL_S = 10.0  # limit for Slurm's controller to respond
# Variables that identify the job. Slurm's other variables describe the current step or batch script, and would affect
# the new step, such as SLURM_GPUS_PER_TASK; CUDA_VISIBLE_DEVICES and ssh's variables are valid on this host only.
OF_THE_JOB = ("SLURM_JOB_ID", "SLURM_CONF")


def inside(environment: Mapping[str, str]) -> bool:
    """Return whether this process runs in an allocation with nodes that srun reaches."""
    return bool(environment.get("SLURM_JOB_ID")) and find("srun") is not None


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun, which it passes on to the command."""
    strange = ("SLURM_", "SLURMD_", "SRUN_", "SSH_", VISIBLE)
    return {name: value for name, value in environment.items() if name in OF_THE_JOB or not name.startswith(strange)}


def gres(node: str, environment: Mapping[str, str]) -> list[str]:
    """Return the option for all GPUs of a node; empty if their number is unknown, and srun takes the job's request.

    By that request a step of one task may get only the GPUs of one task, and with --gpus it needs those of all nodes.
    """
    allocation = read_allocation(environment)
    if allocation is None:
        return []
    gpus = None
    if allocation.gpus is not None:
        gpus = dict(zip((host.name for host in allocation.hosts), allocation.gpus, strict=True)).get(node)
    elif environment.get("SLURM_GPUS"):
        details = ["scontrol", "--details", "show", "job", environment.get("SLURM_JOB_ID", "")]
        with contextlib.suppress(ProcessError):
            gpus = gpus_in_details(ask(details, timeout_s=SCONTROL_S).out, node)
    return [f"--gres=gpu:{gpus}"] if gpus else []


def main(node: str, *command: str) -> NoReturn:
    """Replace this process by the srun of a step."""
    step = ["srun", *STEP, *gres(node, os.environ), f"--nodelist={node}", "sh", "-c", " ".join(command)]
    os.execvpe(step[0], step, step_environment(os.environ))  # noqa: S606 (that is what this file is for)


if __name__ == "__main__":
    main(*sys.argv[1:])
