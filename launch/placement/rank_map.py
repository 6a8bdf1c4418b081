"""Pure: assigns a host's selected GPUs to ranks, so that the largest flows use the fastest links.

The communication time of a step is modelled as the slowest link of the flow inside replicas plus the slowest link of
the flow between them (launch.placement.traffic): each flow ends when its slowest link does, and the flows follow each
other. The time of a link is its bytes in the direction that carries more, divided by its GB/s one way, from the table
of link speeds or measured; PCIe links count as if no other pair used them. If the speed of one link is unknown, all
links are rated by their kind.

From the PCI order and the ring order, two ranks are swapped as long as this reduces the step's time, then the total
time of all links. A search through all orders then looks for an improvement by GAIN; it is exact unless it takes more
than MAX_STEPS. If the gain is less than GAIN, the ring order is kept.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

from launch.machine.topology import Link, Topology, position
from launch.placement.selection import link_weights, weight
from launch.placement.traffic import Flow

GAIN = 1.03  # smaller gains are ignored: speeds are not known more exactly
MAX_STEPS = 20_000  # of a search, 0.1 s
EXACT = 8  # GPUs, which took at most 11,000 steps

Speeds = tuple[tuple[float, ...], ...]  # [place][place], GB/s or points by kind
Order = tuple[int, ...]  # the place of each rank
Loads = tuple[tuple[tuple[tuple[int, int], float], ...], ...]  # of each flow: two ranks, bytes one way


def loads(flows: Collection[Flow]) -> Loads:
    """Return the bytes of each pair of ranks in the direction that carries more, by flow."""
    by_flow = []
    for flow in flows:
        pairs = {(min(pair), max(pair)) for pair, sent in flow.items() if sent}
        by_flow.append(tuple(((a, b), max(flow.get((a, b), 0), flow.get((b, a), 0))) for a, b in sorted(pairs)))
    return tuple(by_flow)


def map_ranks(topology: Topology, ring: Sequence[int], flows: Collection[Flow]) -> tuple[int, ...]:
    """Return the GPU (index) of each rank; `ring` are the selected GPUs in ring order, `flows` are this host's."""
    speeds = link_speeds(topology, ring)
    in_pci_order = tuple(sorted(range(len(ring)), key=lambda place: ring[place]))
    return tuple(ring[place] for place in best_order(speeds, loads(flows), in_pci_order))


def step_s(topology: Topology, gpus: Sequence[int], flows: Collection[Flow]) -> float | None:
    """Return the seconds of a step's slowest links, for ranks 0, 1... on these GPUs; None if a speed is unknown."""
    places = [position(topology, gpu) for gpu in gpus]
    slowest_s = 0.0
    for flow in loads(flows):
        most_s = 0.0
        for (a, b), sent in flow:
            link = topology.links[places[a]][places[b]]
            if link.gbps is None:
                return None
            gbps = link.gbps if link.p2p or topology.measured else link.gbps / 2
            most_s = max(most_s, sent / gbps / 1e9)
        slowest_s += most_s
    return slowest_s


def link_speeds(topology: Topology, gpus: Sequence[int]) -> Speeds:
    """Return the GB/s between these GPUs, halved without P2P; if one is unknown, points by kind.

    Measured speeds less than a tenth apart count as equal.
    """
    places = [position(topology, gpu) for gpu in gpus]
    weights = link_weights(topology, places)
    if topology.measured:
        return tuple(tuple(mb_per_s / 1000 for mb_per_s in row) for row in weights)
    table = [[topology.links[a][b] for b in places] for a in places]
    is_known = all(link.gbps for row in table for link in row if link.kind != "X")

    def speed(link: Link) -> float:
        whole = link.gbps or 0.0 if is_known else float(weight(replace(link, p2p=True)))
        return whole if link.p2p else whole / 2

    return tuple(tuple(map(speed, row)) for row in table)


@lru_cache
def best_order(speeds: Speeds, flows: Loads, in_pci_order: Order) -> Order:
    """Return the place of each rank: 0, 1, 2..., the ring order, unless another order gains enough over it."""
    size = len(speeds)
    ring = tuple(range(size))
    if len({speed for row in speeds for speed in row if speed}) < 2:
        return ring
    # The search is exact for 8 GPUs; more of them need other starts, in which equal parts of replicas are together.
    parts = [n for n in range(2, size) if size % n == 0 and size > EXACT]
    starts = [in_pci_order, ring, *(tuple(rank % n * (size // n) + rank // n for rank in ring) for n in parts)]
    best = min((_exchanged(speeds, flows, start) for start in starts), key=lambda order: _cost(speeds, flows, order))
    best = _searched(speeds, flows, best)
    return best if _cost(speeds, flows, ring)[0] > GAIN * _cost(speeds, flows, best)[0] else ring


def _cost(speeds: Speeds, flows: Loads, order: Sequence[int]) -> tuple[float, float]:
    """Return bytes over GB/s for the slowest links of the flows, and for all links together, rounded."""
    taken = [[sent / speeds[order[a]][order[b]] for (a, b), sent in flow] for flow in flows]
    return round(sum(max(flow, default=0.0) for flow in taken), 3), round(sum(map(sum, taken)), 3)


def _exchanged(speeds: Speeds, flows: Loads, start: Order) -> Order:
    """Swap pairs of ranks as long as a swap helps, the best one first; return the order."""
    best = start
    while True:
        swapped = []
        for a, b in combinations(range(len(start)), 2):
            order = list(best)
            order[a], order[b] = order[b], order[a]
            swapped.append(tuple(order))
        better = min(swapped, key=lambda order: _cost(speeds, flows, order))
        if _cost(speeds, flows, better) >= _cost(speeds, flows, best):
            return best
        best = better


def _searched(speeds: Speeds, flows: Loads, best: Order) -> Order:
    """Return the order whose slowest links take the least time, if it is GAIN better than `best`, else that.

    Depth first, at most MAX_STEPS; an order is given up as soon as its slowest links so far take too long.
    """
    fastest = max(map(max, speeds))
    limit = _cost(speeds, flows, best)[0] / GAIN
    steps = iter(range(MAX_STEPS))

    def extend(order: Order, slowest: Sequence[float]) -> None:
        nonlocal best, limit
        if len(order) == len(speeds):
            best, limit = order, sum(slowest) / GAIN
            return
        for place in range(len(speeds)):
            if place in order or next(steps, None) is None:
                continue
            longer = list(slowest)
            for number, flow in enumerate(flows):
                sent = [(a, bytes_sent) for (a, b), bytes_sent in flow if b == len(order)]
                longer[number] = max([longer[number], *(n / speeds[order[a]][place] for a, n in sent)])
            if sum(longer) < limit:
                extend((*order, place), longer)

    extend((), [max((sent for _, sent in flow), default=0.0) / fastest for flow in flows])
    return best


def describe_gain(topology: Topology, gpus: Sequence[int], flows: Collection[Flow]) -> str:
    """Describe the time of a host's slowest links in a step, and what it would be with ranks in PCI order."""
    mapped_s = step_s(topology, gpus, flows)
    usual_s = step_s(topology, sorted(gpus), flows)
    if mapped_s is None:
        return "the speed of a link is not known: links count by their kind, and the gain is not known"
    slowest = f"the slowest links take {mapped_s * 1e3:.3g} ms a step"
    if usual_s is None:
        return f"{slowest}; ranks in order would use a link whose speed is not known, so the gain is not known"
    if not mapped_s:
        return "its ranks send each other nothing"
    if usual_s < GAIN * mapped_s:
        return f"no map is faster than ranks in order, whose slowest links take {mapped_s * 1e3:.3g} ms a step"
    return f"{slowest}, {usual_s / mapped_s:.2f} times as fast as with ranks in order ({usual_s * 1e3:.3g} ms)"
