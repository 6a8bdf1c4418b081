"""What ranks send each other in each step, by the traffic.json of an earlier run: whose links carry how much.

The ranks of a replica are consecutive, and hold a part of the model each. What they send each other, and the gradients
that ranks with the same part sum over the replicas, are two flows, which do not happen at the same time. A sum of B
bytes over n ranks goes round a ring in the order of the ranks: 2(n-1)/n x B over each of its links, as NCCL's ring
sends it (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.errors import TopologyError
from launch.machine.decode import decode

FILE = "traffic.json"  # of a run folder
REMEDY = f"pass the folder of a run of hvdtrain that has ended, or its {FILE}"

Flow = Mapping[tuple[int, int], float]  # bytes of a step from one rank to another


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What two ranks of a replica send each other."""

    part: int  # of the other one
    bytes: int  # each way


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the rank with this part of a replica sends in a step."""

    exchanges: tuple[Exchange, ...]  # each pair of parts once
    sums_bytes: int  # of the tensors that it sums with all ranks of its replica
    gradient_bytes: int  # that it sums with the ranks that have the same part


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the ranks of a run send in a step."""

    parts: tuple[Part, ...]  # of a replica, in the order of its ranks


def read(text: str, *, name: str) -> Traffic:
    """The traffic in what a run has written; TopologyError, with the file's name, where it is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise TopologyError(f"{name}: it is not from a run: {REMEDY}") from None
    traffic: Traffic = decode(document, Traffic, name)
    for place, part in enumerate(traffic.parts):
        where = f"{name}: parts[{place}]"
        counts = (part.sums_bytes, part.gradient_bytes, *(exchange.bytes for exchange in part.exchanges))
        others = set(range(len(traffic.parts))) - {place}
        if min(counts) < 0 or any(exchange.part not in others for exchange in part.exchanges):
            raise TopologyError(f"{where}: expected bytes of at least 0, and other parts of the replica: {REMEDY}")
    if not traffic.parts:
        raise TopologyError(f"{name}: no rank in it sends anything: {REMEDY}")
    return traffic


def flows(traffic: Traffic, np: int) -> tuple[Flow, Flow]:
    """What so many ranks send inside their replicas, and between replicas."""
    inside, between = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    size = len(traffic.parts)
    for first in range(0, np, size):
        for place, part in enumerate(traffic.parts):
            for exchange in part.exchanges:
                inside[first + place, first + exchange.part] += exchange.bytes
                inside[first + exchange.part, first + place] += exchange.bytes
        _add_ring(inside, range(first, first + size), max(part.sums_bytes for part in traffic.parts))
    for place, part in enumerate(traffic.parts):
        _add_ring(between, range(place, np, size), part.gradient_bytes)
    return inside, between


def _add_ring(flow: "Counter[tuple[int, int]]", ranks: Sequence[int], total_bytes: int) -> None:
    count = len(ranks)
    if count < 2 or not total_bytes:
        return
    for rank, other in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
        flow[rank, other] += round(2 * (count - 1) / count * total_bytes)


def on_host(flow: Flow, first: int, ranks: int) -> Flow:
    """What so many ranks from `first` on send each other, counted from 0."""
    inside = range(first, first + ranks)
    return {(a - first, b - first): sent for (a, b), sent in flow.items() if a in inside and b in inside}
