"""Pure: assigns a host's selected GPUs to ranks, so that the largest flows use the fastest links.

The communication time of a step is modelled as the slowest link of the flow inside replicas plus the slowest link of
the flow between them (launch.placement.traffic): each flow ends when its slowest link does, and the flows follow each
other. The time of a link is its bytes in the direction that carries more, divided by its GB/s one way, from the table
of link speeds or measured; PCIe links count as if no other pair used them. If the speed of one link is unknown, all
links are rated by their kind.

Starting from the ring order and the PCI order, two ranks are swapped as long as this reduces the step's time, then the
total time of all links. A search through all orders then looks for an improvement by GAIN; it is exact unless it takes
more than MOST_STEPS. If the gain is less than GAIN, the ring order is kept.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from operator import length_hint

from launch.machine.topology import Link, Topology, position
from launch.placement.selection import NVLINK, WEIGHTS, link_weights
from launch.placement.traffic import Flow

GAIN = 1.03  # smaller gains are ignored: speeds are not known more exactly
# Limit of a search: about half a second. 8 GPUs took at most 12,000 steps; 2 of 16 cases of 16 GPUs more than 400,000.
MOST_STEPS, MOST_STEPS_AT_ONCE = 100_000, 20_000

Speeds = tuple[tuple[float, ...], ...]  # [place][place], GB/s or points by kind
Order = tuple[int, ...]  # the place of each rank
Loads = tuple[tuple[tuple[tuple[int, int], float], ...], ...]  # of each flow: two ranks, bytes one way

Needed = list[tuple[int, float]]  # of a rank: the required speed to an earlier one


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """The load of a link between two GPUs of a host in a step."""

    gpus: tuple[int, int]  # indices
    link: Link
    inside_bytes: float  # one way, in the direction that carries more
    between_bytes: float


def loads(flows: Collection[Flow]) -> Loads:
    """Return the bytes of each pair of ranks in the direction that carries more, by flow."""
    by_flow = []
    for flow in flows:
        pairs = {(min(pair), max(pair)) for pair, sent in flow.items() if sent}
        by_flow.append(tuple(((a, b), max(flow.get((a, b), 0), flow.get((b, a), 0))) for a, b in sorted(pairs)))
    return tuple(by_flow)


def map_ranks(topology: Topology, ring: Sequence[int], flows: Collection[Flow]) -> tuple[int, ...]:
    """Return the GPU (index) of each rank; `ring` are the selected GPUs in ring order, `flows` are this host's."""
    speeds, _ = link_speeds(topology, ring)
    in_pci_order = tuple(sorted(range(len(ring)), key=lambda place: ring[place]))
    order = best_order(speeds, loads(flows), (tuple(range(len(ring))), in_pci_order))
    return tuple(ring[place] for place in order)


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


def link_loads(topology: Topology, gpus: Sequence[int], flows: tuple[Flow, Flow]) -> list[LinkLoad]:
    """Return the load of each used link, by GPUs."""
    inside, between = map(dict, loads(flows))
    places = [position(topology, gpu) for gpu in gpus]
    by_link = [
        LinkLoad(
            gpus=(min(gpus[a], gpus[b]), max(gpus[a], gpus[b])),
            link=topology.links[places[a]][places[b]],
            inside_bytes=inside.get((a, b), 0),
            between_bytes=between.get((a, b), 0),
        )
        for a, b in {**inside, **between}
    ]
    return sorted(by_link, key=lambda load: load.gpus)


def link_speeds(topology: Topology, gpus: Sequence[int]) -> tuple[Speeds, bool]:
    """Return the GB/s between these GPUs, halved without P2P; if one is unknown, points by kind and False.

    Measured speeds less than a tenth apart count as equal.
    """
    places = [position(topology, gpu) for gpu in gpus]
    if topology.measured:
        return tuple(tuple(mb_per_s / 1000 for mb_per_s in row) for row in link_weights(topology, places)), True
    table = [[topology.links[a][b] for b in places] for a in places]
    is_known = all(table[a][b].gbps for a, b in combinations(range(len(places)), 2))
    return tuple(tuple(_speed(link, is_known=is_known) for link in row) for row in table), is_known


def _speed(link: Link, *, is_known: bool) -> float:
    if link.kind == "X":
        return 0.0
    speed = link.gbps or 0.0 if is_known else NVLINK * link.count if link.kind == "NV" else WEIGHTS[link.kind]
    return speed if link.p2p else speed / 2


@lru_cache
def best_order(speeds: Speeds, flows: Loads, starts: tuple[Order, ...]) -> Order:
    """Return the place of each rank; the first of the `starts` unless another order gains enough over it."""
    tried = [_exchanged(speeds, flows, start) for start in reversed(starts)]
    best = min(tried, key=lambda order: _cost(speeds, flows, order))
    if (better := _searched(speeds, flows, _cost(speeds, flows, best)[0] / GAIN)) is not None:
        best = _exchanged(speeds, flows, better)
    usual_s, best_s = (_cost(speeds, flows, order)[0] for order in (starts[0], best))
    return best if usual_s > GAIN * best_s else starts[0]


def _cost(speeds: Speeds, flows: Loads, order: Sequence[int]) -> tuple[float, float]:
    """Return bytes over GB/s for the slowest links of the flows, and for all links together."""
    slowest = together = 0.0
    for flow in flows:
        most = 0.0
        for (a, b), sent in flow:
            taken = sent / speeds[order[a]][order[b]]
            together += taken
            most = max(most, taken)
        slowest += most
    return slowest, together


def _exchanged(speeds: Speeds, flows: Loads, start: Order) -> Order:
    """Swap pairs of ranks as long as a swap helps, the best one first; return the order."""
    order, cost = list(start), _cost(speeds, flows, start)
    while True:
        exchange = None
        for a, b in combinations(range(len(order)), 2):
            order[a], order[b] = order[b], order[a]
            changed = _cost(speeds, flows, order)
            order[a], order[b] = order[b], order[a]
            if _is_less(changed, cost):
                cost, exchange = changed, (a, b)
        if exchange is None:
            return tuple(order)
        a, b = exchange
        order[a], order[b] = order[b], order[a]


def _is_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Compare like tuples, except for rounding errors: otherwise the swaps might never end."""
    return one[0] < (1 - 1e-9) * other[0] or (one[0] <= other[0] and one[1] < (1 - 1e-9) * other[1])


def _searched(speeds: Speeds, flows: Loads, most: float) -> Order | None:
    """Return the order with the fastest slowest links, if it takes less than `most`; None if none was found.

    The time of a flow's slowest link, its bytes over its speed, has few possible values. From the highest value on, the
    search looks for an order in which no link takes longer.
    """
    flows, best, fits = tuple(flow for flow in flows if flow), None, _Fits(speeds)
    known = {speed for row in speeds for speed in row if speed}
    values = [{sent / speed for _, sent in flow for speed in known} for flow in flows]
    least = [max(sent for _, sent in flow) / max(known) for flow in flows]
    limits = product(*([value for value in own if value >= low] for own, low in zip(values, least, strict=True)))
    for limit in sorted(limits, key=sum, reverse=True):
        if not fits.left:
            break
        if sum(limit) >= most:
            continue
        needed: list[Needed] = [[] for _ in speeds]
        for flow, taken in zip(flows, limit, strict=True):
            for (a, b), sent in flow:
                needed[b].append((a, (1 - 1e-9) * sent / taken))
        if (order := fits.find(needed)) is not None:
            best, most = order, _cost(speeds, flows, order)[0] / GAIN
    return best


class _Fits:
    """Searches depth first, in MOST_STEPS altogether, for orders in which given links have given speeds.

    If several free places are equivalent, because their links to all others are equal, only the first is tried.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds, self.left = speeds, MOST_STEPS
        self._alike = [[a for a in range(b) if _are_alike(speeds, a, b)] for b in range(len(speeds))]

    def find(self, needed: Sequence[Needed]) -> Order | None:
        """Return the first such order; None if there is none, or after MOST_STEPS_AT_ONCE."""
        steps = iter(range(min(MOST_STEPS_AT_ONCE, self.left)))
        self.left -= length_hint(steps)
        order = self._longer((), needed, steps)
        self.left += length_hint(steps)
        return order

    def _longer(self, order: Order, needed: Sequence[Needed], steps: Iterator[int]) -> Order | None:
        if len(order) == len(needed):
            return order
        if next(steps, None) is None:
            return None
        for place, row in enumerate(self._speeds):
            if place in order or any(other not in order for other in self._alike[place]):
                continue
            is_fast = all(row[order[rank]] >= speed for rank, speed in needed[len(order)])
            if is_fast and (found := self._longer((*order, place), needed, steps)) is not None:
                return found
        return None


def _are_alike(speeds: Speeds, a: int, b: int) -> bool:
    return all(speeds[a][other] == speeds[b][other] for other in range(len(speeds)) if other not in (a, b))


def describe_gain(topology: Topology, gpus: Sequence[int], flows: Collection[Flow]) -> str:
    """Describe the time of a host's slowest links in a step, and what it would be with ranks in PCI order."""
    mapped_s = step_s(topology, gpus, flows)
    usual_s = step_s(topology, sorted(gpus), flows)
    if mapped_s is None:
        return "the speed of a link is not known: links count by their kind, and the gain is not known"
    if usual_s is None:
        return (
            f"the slowest links take {mapped_s * 1e3:.3g} ms a step; ranks in order would use a link whose speed is "
            "not known, so the gain is not known"
        )
    if not mapped_s:
        return "its ranks send each other nothing"
    if usual_s < GAIN * mapped_s:
        return f"no map is faster than ranks in order, whose slowest links take {mapped_s * 1e3:.3g} ms a step"
    return (
        f"the slowest links take {mapped_s * 1e3:.3g} ms a step, {usual_s / mapped_s:.2f} times as fast as with ranks "
        f"in order ({usual_s * 1e3:.3g} ms)"
    )
