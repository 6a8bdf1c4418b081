"""The data that ranks send each other in each step, and the links that carry it, from traffic.json of an earlier run.

The ranks of a replica are consecutive, and each holds a part of the model. Data sent inside replicas, and gradients
summed over replicas by ranks with the same part, are two flows at different times. A sum of B bytes over n ranks
travels round a ring in rank order: 2(n-1)/n x B over each link, as in NCCL's ring (NVIDIA/nccl-tests,
doc/PERFORMANCE.md).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch import documents
from launch.errors import TopologyError
from launch.machine.decode import decode

FILE = "traffic.json"  # in a run folder
REMEDY = f"pass the folder of a run of hvdtrain that has ended, or its {FILE}"

Flow = Mapping[tuple[int, int], float]  # bytes per step from one rank to another


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The data that two ranks of a replica exchange."""

    part: int  # of the other rank
    bytes: int  # in each direction


@dataclass(frozen=True, kw_only=True)
class PartTraffic:
    """The data that the rank with this part of a replica sends per step."""

    exchanges: tuple[Exchange, ...]  # each pair of parts once
    sums_bytes: int  # of tensors summed over all ranks of the replica
    gradient_bytes: int  # summed over the ranks with the same part


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The data that the ranks of a run send per step."""

    parts: tuple[PartTraffic, ...]  # of a replica, in rank order


def is_traffic(text: str) -> bool:
    """Return whether this looks like the traffic of a run."""
    try:
        return "parts" in documents.parse(text)
    except (ValueError, TypeError):
        return False


def read(text: str, *, name: str) -> Traffic:
    """Parse the traffic of a run; TopologyError, with the file's name, if it is something else."""
    try:
        document = documents.parse(text)
    except ValueError:
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
    """Return the flows of `np` ranks inside replicas and between replicas."""
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
    """Return the flow among the `ranks` ranks starting at `first`, renumbered from 0."""
    inside = range(first, first + ranks)
    return {(a - first, b - first): sent for (a, b), sent in flow.items() if a in inside and b in inside}
