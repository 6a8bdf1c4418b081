"""Detects processes that a launcher other than MPI has started together."""

import re
import sys
import time
from collections.abc import Mapping

from hvdtrain.settings.safety.exits import BAD_INPUT, FIRST_ERROR_S, BadInput


def require_joined(environment: Mapping[str, str]) -> None:
    """Raise BadInput in a process that is alone in MPI but was started with others; only the first reports it.

    The other processes wait and exit silently. Processes of torchrun connect over torch, those of srun without PMI not
    at all. SLURM_NTASKS is not sufficient, since a batch script has it too; and if mpirun has started this process, the
    tasks of its Slurm step are mpirun's daemons.
    """
    if "TORCHELASTIC_RUN_ID" in environment and "HVDLAUNCH_PLAN" not in environment:
        _require_single("torchrun", environment, size="WORLD_SIZE", rank="RANK", single="torchrun --nproc-per-node 1")
    if "OMPI_COMM_WORLD_SIZE" not in environment and not _is_outer_step(environment):
        _require_single("srun", environment, size="SLURM_STEP_NUM_TASKS", rank="SLURM_PROCID", single="mpirun -np 1")


def _is_outer_step(environment: Mapping[str, str]) -> bool:
    """Return whether the variables describe an outer Slurm step.

    A batch script submitted within a step inherits the step's variables, but it is the only task on its node.
    """
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # of the first node, for example 2(x3),1
    node_tasks = environment.get("SLURM_GTIDS", "").split(",")  # the tasks on this node
    return tasks is not None and environment.get("SLURM_PROCID") == "0" and int(tasks[0]) != len(node_tasks)


def _require_single(launcher: str, environment: Mapping[str, str], *, size: str, rank: str, single: str) -> None:
    count = int(environment.get(size, "1"))
    if count == 1:
        return
    if environment.get(rank, "0") != "0":
        time.sleep(FIRST_ERROR_S)
        sys.exit(BAD_INPUT)
    raise BadInput(
        f"{launcher} started {count} independent processes (no MPI between them): each would train a separate model. "
        f"Use mpirun -np {count}, horovodrun -np {count} or hvdlaunch run -np {count} instead of {launcher}, or "
        f"start one process with {single}."
    )
