"""Slurm's lists of nodes and tasks -> hosts."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from launch.cores import parse_range
from launch.hosts.host import MAX_HOSTS, Entry, Host, error_at, merge, parse_name, parse_slots

_ITEM = r"(?:[^,\[\]]|\[[^\[\]]*\])+"


def from_slurm(nodes: str, tasks_per_node: str | None = None, slots: int | None = None) -> tuple[Host, ...]:
    """Parse the hosts of `node[01-03,07],gpu1:8`, without Slurm's own tools.

    Their slots come from one source: `:8` in the list, `tasks_per_node` (SLURM_TASKS_PER_NODE, for example `2(x3),1`),
    or `slots` for each; otherwise they are not counted.
    """
    where = "Slurm's node list"
    if not re.fullmatch(f"{_ITEM}(?:,{_ITEM})*", nodes):
        raise error_at(where, nodes, "is not understood; write node[01-03,07],gpu1")
    hosts: list[Host] = []
    for item in re.findall(_ITEM, nodes):
        pattern, colon, suffix = item.partition(":")
        if colon and (tasks_per_node is not None or slots is not None):
            raise error_at(where, item, "has its slots twice; remove them here or there")
        count = parse_slots(where, suffix if colon else str(1 if slots is None else slots))
        counted = bool(colon) or slots is not None
        names = _expanded(where, pattern, MAX_HOSTS - len(hosts))
        hosts += [Host(name=parse_name(where, name), slots=count, counted=counted) for name in names]
    if tasks_per_node is not None:
        counts = _tasks(tasks_per_node, len(hosts))
        hosts = [replace(host, slots=count, counted=True) for host, count in zip(hosts, counts, strict=True)]
    return merge((Entry(where=where, host=host) for host in hosts), where)


def gpus_of_one_task(environment: Mapping[str, str]) -> int | None:
    """Return the GPUs of each node if one task has them all, as for torchrun; None with one task per GPU."""
    if not re.fullmatch(r"1(?:\(x[0-9]+\))?", environment.get("SLURM_TASKS_PER_NODE", "")):
        return None
    gpu_counts = environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_GPUS_PER_NODE") or ""
    counts = [word.rpartition(":")[2] for word in gpu_counts.split(",")]  # 8, a100:8 or a100:4,v100:4
    gpus = sum(int(count) for count in counts if re.fullmatch("[0-9]{1,9}", count))
    return gpus if gpus > 1 else None


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


def _tasks(text: str, hosts: int) -> list[int]:
    where = "SLURM_TASKS_PER_NODE"
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,9})\))?", item)
        if not match:
            raise error_at(where, item, "is not understood; write 2(x3),1")
        # At most one too many, even if x is huge.
        counts += [parse_slots(where, match[1])] * min(int(match[2] or 1), hosts + 1 - len(counts))
    if len(counts) != hosts:
        raise error_at(where, text, f"does not fit {hosts} hosts; pass one number for each, such as 2(x3),1")
    return counts
