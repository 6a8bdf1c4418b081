"""Slurm's lists of nodes and tasks -> hosts."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.cores import parse_range
from launch.hosts.host import MAX_HOSTS, Entry, Host, error_at, merge, parse_name, parse_slots

_OF_GPUS = ("GPUS_PER_TASK", "GPUS_PER_NODE", "GPUS_ON_NODE", "GPUS")
_ITEM = r"(?:[^,\[\]]|\[[^\[\]]*\])+"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a Slurm job, or of the step that this process belongs to."""

    hosts: tuple[Host, ...]
    gpus: tuple[int, ...] | None  # of each host; None: unknown
    step_of: int | None  # nodes of the job, if these are a step's; None: the hosts are the job's


def from_slurm(nodes: str, where: str = "Slurm's node list") -> tuple[Host, ...]:
    """Parse the hosts of `node[01-03,07],gpu1:8`, without Slurm's own tools; those without `:8` are not counted."""
    if not re.fullmatch(f"{_ITEM}(?:,{_ITEM})*", nodes):
        raise error_at(where, nodes, "is not understood; write node[01-03,07],gpu1")
    hosts: list[Host] = []
    for item in re.findall(_ITEM, nodes):
        pattern, colon, suffix = item.partition(":")
        count = parse_slots(where, suffix if colon else "1")
        names = _expanded(where, pattern, MAX_HOSTS - len(hosts))
        hosts += [Host(name=parse_name(where, name), slots=count, counted=bool(colon)) for name in names]
    return merge((Entry(where=where, host=host) for host in hosts), where)


def read_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Read Slurm's variables, all of one scope; None outside of an allocation. An empty variable is not set.

    | fact  | in a job                            | in a step of srun         |
    |-------|-------------------------------------|---------------------------|
    | nodes | SLURM_JOB_NODELIST (SLURM_NODELIST) | SLURM_STEP_NODELIST       |
    | tasks | SLURM_TASKS_PER_NODE                | SLURM_STEP_TASKS_PER_NODE |
    | GPUs  | see `_gpus`                         | see `_gpus`               |

    srun sets SLURM_TASKS_PER_NODE to its step's. The shell of salloc is a step that keeps the job's, and has the whole
    job. Tasks that do not fit the nodes are of another scope, and count nothing.
    """
    values = {name.removeprefix("SLURM_"): text for name, text in environment.items() if text}
    job, step = values.get("JOB_NODELIST") or values.get("NODELIST"), values.get("STEP_NODELIST")
    if job is None:
        return None
    hosts, tasks, step_of = from_slurm(job), values.get("TASKS_PER_NODE"), None
    if step is not None:
        of_step = values.get("STEP_TASKS_PER_NODE") or tasks
        if tasks == of_step or _tasks(tasks, len(hosts)) is None:
            hosts, tasks, step_of = from_slurm(step), of_step, len(hosts)
    counts = _tasks(tasks, len(hosts))
    gpus = _gpus(values, counts, len(hosts))
    if counts is not None and max(counts) == 1:  # one task on each node has all its GPUs, as for torchrun
        requested = step is None and "NTASKS" in values and not values.keys() & set(_OF_GPUS)
        counts = counts if requested else gpus and tuple(max(1, count) for count in gpus)
        hosts = tuple(replace(host, unit="node") for host in hosts)
    elif step_of or "NTASKS" in values:  # else salloc --exclusive may have counted cores
        hosts = tuple(replace(host, unit="rank") for host in hosts)
    if counts is not None:
        hosts = tuple(replace(host, slots=n, counted=True) for host, n in zip(hosts, counts, strict=True))
    return Allocation(hosts=hosts, gpus=gpus, step_of=step_of)


def _gpus(values: Mapping[str, str], tasks: Sequence[int] | None, nodes: int) -> tuple[int, ...] | None:
    """Return the GPUs of each node; None if the variables do not say, or contradict each other.

    | variable            | what it counts                                                 |
    |---------------------|----------------------------------------------------------------|
    | SLURM_GPUS_PER_TASK | the GPUs of a task: a node has as many for each of its tasks   |
    | SLURM_GPUS_PER_NODE | the GPUs of each node                                          |
    | SLURM_GPUS_ON_NODE  | the GPUs of this node, and of each node if they sum to SLURM_GPUS |
    """
    per_task, per_node, here, total = (_count_of_gpus(values.get(name)) for name in _OF_GPUS)
    if per_task is not None and tasks is not None:
        gpus = tuple(per_task * count for count in tasks)
    elif per_node is not None:
        gpus = (per_node,) * nodes
    elif here is not None and (nodes == 1 or total == here * nodes):
        gpus = (here,) * nodes
    else:
        return None
    return gpus if here is None or here in gpus else None


def gpus_in_details(text: str, node: str) -> int | None:
    """Return the GPUs that a job has on a node, by `scontrol --details show job`; None if the text does not say."""
    for nodes, gres in re.findall(r"^\s*Nodes=(\S+) .*\bGRES=(\S*)", text, re.MULTILINE):
        if any(host.name == node for host in from_slurm(nodes)):
            return _count_of_gpus(",".join(re.findall(r"gpu:[^,(]+", gres)))
    return None


def _count_of_gpus(text: str | None) -> int | None:
    """Parse 8, a100:8, gpu:a100:8(S:0-1) or a100:4,v100:4; None for anything else."""
    counts = [word.rpartition(":")[2] for word in re.sub(r"\([^()]*\)", "", text or "").split(",")]
    return sum(map(int, counts)) if all(re.fullmatch("[0-9]{1,9}", count) for count in counts) else None


def _expanded(where: str, pattern: str, room: int) -> Iterator[str]:
    parts = re.split(r"\[([^\[\]]*)\]", pattern)  # text, ranges, text, ranges, text
    ranges = [[_bounds(where, bounds) for bounds in part.split(",")] for part in parts[1::2]]
    if math.prod(sum(last - first + 1 for first, last, _ in part) for part in ranges) > room:
        raise error_at(where, pattern, f"makes more than {MAX_HOSTS} hosts; check its ranges")
    choices = [[f"{n:0{width}}" for first, last, width in part for n in range(first, last + 1)] for part in ranges]
    for numbers in itertools.product(*choices):
        yield parts[0] + "".join(map("".join, zip(numbers, parts[2::2], strict=True)))


def _bounds(where: str, text: str) -> tuple[int, int, int]:
    """Parse `7`, `8-11` or `08-11`: first, last, and the width for leading zeros."""
    ends = parse_range(text)
    if ends is None:
        raise error_at(where, text, "is not a range; write 01-03 or 7, the smaller number first")
    first, last = ends
    padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
    if padded and len(first) != len(last):
        raise error_at(where, text, "is not a range; write both numbers equally wide, as in 01-10")
    return int(first), int(last), len(first)


def _tasks(text: str | None, nodes: int) -> tuple[int, ...] | None:
    """Parse `2(x3),1`; None if that is not one number for each of the nodes."""
    where = "SLURM_TASKS_PER_NODE"
    counts: list[int] = []
    for item in text.split(",") if text else ():
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,9})\))?", item)
        if not match:
            raise error_at(where, item, "is not understood; write 2(x3),1")
        # At most one too many, even if x is huge.
        counts += [parse_slots(where, match[1])] * min(int(match[2] or 1), nodes + 1 - len(counts))
    return tuple(counts) if len(counts) == nodes else None
