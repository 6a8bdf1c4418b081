"""Pure: a command -> the Slurm batch script that starts it."""

import math
import re
import shlex
from collections.abc import Sequence

CLEAN_UP_S = 10  # to end all ranks that have not saved in time


def sbatch(
    command: Sequence[str], *, name: str, folder: str, np: int, nodes: Sequence[str], gpus: bool, grace_s: float
) -> str:
    """A Slurm batch script that starts `command`, which finds the nodes of its allocation by itself.

    It asks for `nodes` if there are any; else Slurm chooses. The command gets SIGUSR1 `grace_s` and some seconds before
    the end. A job that Slurm starts again keeps its name, and with it its run folder.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)  # a line end in it would begin a line of the script
    lines = [
        f"#SBATCH --job-name={plain}",
        f"#SBATCH --ntasks={np}",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:USR1@{math.ceil(grace_s) + CLEAN_UP_S}",
    ]
    if nodes:
        lines += [f"#SBATCH --nodes={len(nodes)}", f"#SBATCH --nodelist={','.join(nodes)}"]
    if gpus:
        lines.append("#SBATCH --gpus-per-task=1")
    lines += [
        f"cd {shlex.quote(folder)} || exit 2",
        f'export HVDLAUNCH_JOB="${{HVDLAUNCH_JOB:-{plain}-$SLURM_JOB_ID}}"',
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(["#!/bin/bash", *lines, ""])
