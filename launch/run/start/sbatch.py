"""Pure: a command -> the Slurm batch script that starts it, with checks before it is queued."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from launch.errors import CommandError
from launch.hosts.host import Host, shown
from launch.machine.topology import Topology, usable_cores
from launch.placement.slots import RankSlot, ranks_per_host

CLEAN_UP_S = 10  # to end all ranks that have not saved in time
# Variables of an activated shell; with them the job finds the same programs wherever it is submitted.
ACTIVATED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
# Our options -> user options that replace them, besides the same option.
REPLACED_BY = {
    "gpus-per-task": {"gpus", "gpus-per-node", "gpus-per-socket", "gres", "ntasks-per-gpu", "tres-per-task"},
    "cpus-per-task": {"cpus-per-gpu"},
    "requeue": {"no-requeue"},
}

COUNTED_GPUS = {"gpus", "gpus-per-task", "gpus-per-socket"}  # per job, task or socket, but not per node

Options = Mapping[str, str | None]  # --batch-option: name -> value


def sbatch(
    command: Sequence[str],
    *,
    name: str,
    folder: str,
    np: int,
    per_host: int | None = None,
    nodes: Sequence[str],
    gpus: bool,
    grace_s: float,
    cores_per_rank: int,
    options: Options,
    environment: Mapping[str, str],
) -> str:
    """Return a Slurm batch script that starts `command`, which finds the nodes of its allocation by itself.

    The script requests `nodes` nodes; if not given, Slurm chooses. The command gets SIGUSR1 `grace_s` and a few more
    seconds before the end. A job that Slurm requeues keeps its name, and so its run folder.
    """
    # A line end would start a new line of the script; the name becomes that of the run folder.
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", options.get("job-name") or name).lstrip(".-") or "job"
    ours: dict[str, str | None] = {
        "job-name": plain,
        "ntasks": str(np),
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:USR1@{math.ceil(grace_s) + CLEAN_UP_S}",
    }
    if (ranks := _ranks_of_a_task(options)) is not None and "cpu" not in (options.get("tres-per-task") or ""):
        ours["cpus-per-task"] = str(cores_per_rank * min(ranks, np))
    if per_host is not None:
        ours["ntasks-per-node"] = str(per_host)
    if nodes:
        ours |= {"nodes": str(len(nodes)), "nodelist": ",".join(nodes)}
    if gpus:
        ours["gpus-per-task"] = "1"
    if "ntasks-per-node" in options and "nodes" in {**ours, **options}:
        del ours["ntasks"]  # the other two options determine it
    kept = {key: value for key, value in ours.items() if not REPLACED_BY.get(key, set()) & options.keys()}
    lines = [
        f"#SBATCH --{key}" if value is None else f"#SBATCH --{key}={shlex.quote(value)}"
        for key, value in {**kept, **options}.items()
    ]
    lines += [f"export {name}={shlex.quote(environment[name])}" for name in ACTIVATED if environment.get(name)]
    lines += [
        f"cd {shlex.quote(folder)} || exit 2",
        f'export HVDLAUNCH_JOB="${{HVDLAUNCH_JOB:-{plain}-$SLURM_JOB_ID}}"',
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(["#!/bin/bash", *lines, ""])


def parse_options(assignments: Sequence[str]) -> dict[str, str | None]:
    """Parse options of sbatch into a dict, with None for options without a value; CommandError for invalid ones."""
    options: dict[str, str | None] = {}
    for word in assignments:
        key, equals, value = word.partition("=")
        plain = re.fullmatch("[a-z][a-z-]*", key) and value.isascii() and value.isprintable()
        if not plain or (equals and not value):
            raise CommandError(
                f"--batch-option {shown(word)}: pass KEY=VALUE, or only KEY, as sbatch --help spells it without --"
            )
        if key in options:
            raise CommandError(f"--batch-option {key} is repeated: pass it once")
        options[key] = value if equals else None
    return options


def tasks(np: int | None, hosts: Sequence[Host] | None, options: Options) -> int | None:
    """Return the number of ranks: `np`, or the slots of the hosts or of the user's options; None if unknown."""
    counted = sum(host.slots for host in hosts) if hosts and all(host.counted for host in hosts) else None
    return np or counted or _slots(options)


def require_room(np: int, options: Options) -> None:
    """Raise PlacementError if the user's options request fewer slots than there are ranks."""
    if (room := _slots(options)) is not None:
        ranks_per_host((Host(name="--batch-option", slots=room),), np)


def _slots(options: Options) -> int | None:
    """Return the slots that the user's options request; None if they do not determine them."""
    numbers = _numbers(options)
    each = numbers.get("ntasks-per-node")
    counted = COUNTED_GPUS & options.keys()
    if counted or (options.keys() & {"gpus-per-node", "gres"} and numbers.get("ntasks") == numbers.get("nodes", 0)):
        return None  # one task may have all GPUs of a node, and one slot for each
    if each == 1:
        each = _ranks_of_a_task(options)
    if each is not None and "nodes" in numbers:
        return each * numbers["nodes"]
    return numbers.get("ntasks")


def _ranks_of_a_task(options: Options) -> int | None:
    """Return the ranks of a task: one, or one per GPU of a node with one task; None if its GPUs are unknown."""
    if _numbers(options).get("ntasks-per-node") != 1:
        return 1
    if (COUNTED_GPUS - {"gpus-per-task"}) & options.keys():
        return None
    gpu_option = options.get("gpus-per-task") or options.get("gpus-per-node") or options.get("gres") or "1"
    gpus = "" if "," in gpu_option else gpu_option.rpartition(":")[2]
    return int(gpus) if re.fullmatch("0*[1-9][0-9]{0,5}", gpus) else None


def _numbers(options: Options) -> dict[str, int]:
    return {key: int(value) for key, value in options.items() if value and re.fullmatch("[0-9]{1,6}", value)}


def cores_per_rank(slots: Sequence[RankSlot], topologies: Mapping[str, Topology]) -> int | None:
    """Return the cores that every host has for each of its ranks, at least 1; None if a host's cores are unknown."""
    ranks = Counter(slot.host for slot in slots)
    cores = {host: len(usable_cores(topologies[host])) for host in ranks}
    return max(1, min(cores[host] // ranks[host] for host in ranks)) if ranks and all(cores.values()) else None


def job_name(program: Sequence[str]) -> str:
    """Return a name for the job: the module or script that Python runs, else the program."""
    name = PurePath(program[0]).name
    arguments = iter(program[1:] if re.fullmatch(r"python[0-9.]*", name) else ())
    for word in arguments:
        if word == "-m":
            return next(arguments, name)
        if word in ("-W", "-X"):
            next(arguments, None)
        elif word == "-c":
            break
        elif not word.startswith("-"):
            return PurePath(word).stem
    return name
