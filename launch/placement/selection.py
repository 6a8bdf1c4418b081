"""The best k GPUs of a host, the order of their ring, and why.

GPUs that the topology marks as unusable, for example busy ones, are never selected. All sets of k other GPUs are
compared by these rules; a rule decides only if all rules before it give equal results:

1. NVLink rings: the number of rings over all selected GPUs that share no NVLink (launch.placement.rings), times the
   speed of one NVLink (the slowest between selected GPUs; if one on the host is unknown, all count as equal). Two GPUs
   have as many rings as links in their bond. If NV# counts a GPU's links to an NVSwitch (its sum over all peers exceeds
   the number of links of the GPU), the number of rings is the smallest NV#.
2. The slowest link of the ring, if there is no NVLink ring, by weight: SYS 10, NODE 20, PHB 30, PXB 40, PIX 50, NVLink
   100 (the scores of NVIDIA's go-gpuallocator). A pair without P2P copies through the memory of the host: half the
   weight of its PCIe path, or for NVLinks half that of PIX.
3. The sum of these weights over all pairs, each NVLink counted.
4. The fewest NUMA nodes: distinct values of `Gpu.numa`; all unknown ones count as one.
5. Near NICs: the sum over the GPUs of the weight of the link to the nearest NIC.
6. The GPUs left for the next job: rules 1, 2 and 3 for the set of all free GPUs that are not selected.
7. The lowest PCI addresses; the lowest index, if not all addresses are known.

If the links were measured (launch.placement.measured), their speeds replace the weights of rules 1 to 3: the slowest
link of the best ring decides, then the sum over all pairs; speeds less than a tenth apart count as equal.

The ring is the one with the best slowest link, then the largest sum of weights, then the lowest in the order of rule 7,
starting from its lowest GPU.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from launch.errors import SelectionError
from launch.machine.nvidia import NVLINK, WEIGHTS
from launch.machine.topology import Link, Topology, has_switch, position
from launch.placement.rings import MAX_VERTICES, Matrix, are_alike, best_ring, disjoint_rings, slowest_links

ALIKE = 0.9  # measured speeds within this ratio are equal up to noise

STEPS = (  # meaning of the parts of a score, in the order of the rules
    "by NVLink rings",
    "by the slowest link of the ring",
    "by the links of all pairs together",
    "by fewer NUMA nodes",
    "by nearer NICs",
    *["by what is left for the next job"] * 3,
)

Places = tuple[int, ...]  # of GPUs among the free ones in PCI order


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of GPUs."""

    gpus: tuple[int, ...]  # sorted indices
    ring: tuple[int, ...]  # the GPUs in ring order
    bandwidth_gbps: float | None  # of all NVLink rings, else of the slowest link; None if unknown, or for one GPU
    reason: str  # a sentence or two


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The best set of GPUs, and the alternatives."""

    best: Choice
    runner_up: Choice | None  # None if there is only one set
    worst: Choice | None


def select(topology: Topology, k: int) -> Selection:
    """Select the best `k` GPUs that are usable; SelectionError if there are fewer or over 16, or if `k` is below 1."""
    board = _Scoreboard(topology, _in_pci_order(topology, _free(topology, k)))
    best, *others = sorted(combinations(range(board.size), k), key=board.score, reverse=True)  # stable: in PCI order
    return Selection(
        best=board.choice(best, _why_best(board, best, others)),
        runner_up=board.choice(others[0], _why_not(board, others[0], best)) if others else None,
        worst=board.choice(others[-1], _why_not(board, others[-1], best)) if others else None,
    )


def ring_order(topology: Topology, gpus: Collection[int]) -> tuple[int, ...]:
    """Return the best ring over exactly these GPUs (indices), whether free or not.

    TopologyError if one of them is unknown, SelectionError if there are over 16 with unequal links.
    """
    positions = _in_pci_order(topology, {position(topology, gpu) for gpu in gpus})
    weights = link_weights(topology, positions)
    if len(positions) > MAX_VERTICES and not are_alike(weights):
        raise SelectionError(f"{len(positions)} GPUs are too many for a ring to be found; name at most {MAX_VERTICES}")
    return tuple(topology.gpus[positions[v]].index for v in best_ring(weights))


def _free(topology: Topology, k: int) -> list[int]:
    """Return the positions of the GPUs to choose from."""
    if k < 1:
        raise SelectionError(f"cannot choose {k} GPUs; ask for at least 1")
    taken = {gpu.index: gpu.unusable for gpu in topology.gpus if gpu.unusable}
    free = [place for place, gpu in enumerate(topology.gpus) if gpu.index not in taken]
    if k > len(free):
        reasons = "; ".join(f"GPU {index}: {why}" for index, why in sorted(taken.items()))
        remedy = f"ask for at most {len(free)}" if free else "choose another host"
        raise SelectionError(
            f"{topology.source}: cannot choose {k} of {len(topology.gpus)} GPUs, {len(free)} are free"
            f"{f' ({reasons})' if reasons else ''}; {remedy}{', or free some' if taken else ''}"
        )
    if len(free) > MAX_VERTICES:
        raise SelectionError(
            f"{topology.source}: {len(free)} free GPUs are more sets than can be compared; "
            f"name at most {MAX_VERTICES} to choose from with --gpus"
        )
    return free


def _in_pci_order(topology: Topology, positions: Collection[int]) -> list[int]:
    addresses = [gpu.pci for gpu in topology.gpus if gpu.pci is not None]
    by_address = len(addresses) == len(topology.gpus)

    def key(place: int) -> tuple[int, str, int]:
        gpu = topology.gpus[place]
        address = gpu.pci or "" if by_address else ""
        return len(address), address, gpu.index  # domains past ffff have a fifth digit

    return sorted(positions, key=key)


def weight(link: Link) -> int:
    """Return the weight of a link by kind and count."""
    if not link.p2p:
        return WEIGHTS.get(link.kind, WEIGHTS["PIX"]) // 2
    return NVLINK * link.count if link.kind == "NV" else WEIGHTS[link.kind]


def link_weights(topology: Topology, positions: Sequence[int]) -> Matrix:
    """Return weights by kind and count; with measured speeds, MB/s with speeds that differ only by noise made equal."""
    table = [[topology.links[a][b] for b in positions] for a in positions]
    if not topology.measured:
        return tuple(tuple(map(weight, row)) for row in table)
    levels, top = {0: 0}, 0
    for speed in sorted({_mb_per_s(link) for row in table for link in row} - {0}, reverse=True):
        top = speed if speed < ALIKE * top or not top else top
        levels[speed] = top
    return tuple(tuple(levels[_mb_per_s(link)] for link in row) for row in table)


def _mb_per_s(link: Link) -> int:
    return 0 if link.kind == "X" else max(1, round(1000 * (link.gbps or 0)))


class _Scoreboard:
    """Scores sets of the free GPUs in PCI order."""

    def __init__(self, topology: Topology, positions: list[int]) -> None:
        self.size = len(positions)
        self.gpus = [topology.gpus[place] for place in positions]
        self.table = [[topology.links[a][b] for b in positions] for a in positions]
        self.weights = link_weights(topology, positions)
        self.measured = topology.measured
        self.switched = has_switch(topology)
        self.nvlinks = [[0 if self.measured else weight // NVLINK for weight in row] for row in self.weights]
        self.nics = [max((weight(nic.links[place]) for nic in topology.nics), default=0) for place in positions]
        self.speeds = {  # of one NVLink, in MB/s
            (a, b): None if (gbps := self.table[a][b].gbps) is None else round(1000 * gbps / self.nvlinks[a][b])
            for a, b in combinations(range(self.size), 2)
            if self.nvlinks[a][b]
        }
        self.slowest = slowest_links(self.weights)
        self.rings = cache(self._rings)
        self.ring = cache(self._ring)

    def _rings(self, chosen: Places) -> int:
        """Return the number of NVLink rings over a set that share no link."""
        if self.slowest[_mask(chosen)] < NVLINK:
            return 0
        if self.switched:
            return min(self.nvlinks[a][b] for a, b in combinations(chosen, 2))
        return disjoint_rings(tuple(tuple(self.nvlinks[a][b] for b in chosen) for a in chosen))

    def speed(self, chosen: Places) -> int | None:
        """Return the MB/s of the slowest single NVLink in a set."""
        speeds = {self.speeds[pair] for pair in combinations(chosen, 2) if pair in self.speeds}
        return None if None in speeds else min((speed for speed in speeds if speed is not None), default=None)

    def links_score(self, chosen: Places) -> tuple[int, int, int]:
        """Return the score of a set by rules 1 to 3."""
        together = sum(self.weights[a][b] for a, b in combinations(chosen, 2))
        slowest = self.slowest[_mask(chosen)]
        if slowest < NVLINK or not self.rings(chosen):  # measured links are no NVLinks
            return 0, slowest if self.measured else min(slowest, NVLINK), together
        speed = 1 if None in self.speeds.values() else self.speed(chosen) or 1
        return self.rings(chosen) * speed, 0, together

    def score(self, chosen: Places) -> tuple[int, ...]:
        """Return the score by the first six rules, higher is better."""
        return (
            *self.links_score(chosen),
            -len({self.gpus[v].numa for v in chosen}),
            sum(self.nics[v] for v in chosen),
            *self.links_score(self.rest(chosen)),
        )

    def rest(self, chosen: Places) -> Places:
        return tuple(v for v in range(self.size) if v not in chosen)

    def _ring(self, chosen: Places) -> list[int]:
        return [chosen[v] for v in best_ring(tuple(tuple(self.weights[a][b] for b in chosen) for a in chosen))]

    def slowest_of_ring(self, chosen: Places) -> Link:
        """Return the slowest link of the ring of two or more; in a tie the one with the lowest or unknown speed."""
        ring = self.ring(chosen)
        links = [self.table[a][b] for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
        return min(links, key=lambda link: (0 if self.measured else weight(link), link.gbps or 0))

    def bandwidth_gbps(self, chosen: Places) -> float | None:
        if len(chosen) < 2:
            return None
        rings, speed = self.rings(chosen), self.speed(chosen)
        if not rings:
            slowest = self.slowest_of_ring(chosen)
            return slowest.gbps if slowest.p2p or self.measured else None
        return None if speed is None else rings * speed / 1000

    def choice(self, chosen: Places, reason: str) -> Choice:
        ring = tuple(self.gpus[v].index for v in self.ring(chosen))
        return Choice(gpus=tuple(sorted(ring)), ring=ring, bandwidth_gbps=self.bandwidth_gbps(chosen), reason=reason)

    def names(self, chosen: Places) -> str:
        return ",".join(str(index) for index in sorted(self.gpus[v].index for v in chosen))


def _mask(chosen: Places) -> int:
    return sum(1 << v for v in chosen)


def _why_best(board: _Scoreboard, best: Places, others: Sequence[Places]) -> str:
    what, rest = _what_it_is(board, best), board.rest(best)
    what += f"; leaves {board.names(rest)}" if rest else ""
    if not others:
        return f"{what}. There is no other choice: these are all that are free."
    return f"{what}. Before {board.names(others[0])} {_step(board, best, others[0])}."


def _why_not(board: _Scoreboard, chosen: Places, best: Places) -> str:
    return f"{_what_it_is(board, chosen)}. Behind {board.names(best)} {_step(board, best, chosen)}."


def _step(board: _Scoreboard, a: Places, b: Places) -> str:
    """Describe the rule that decides between two sets."""
    parts = zip(STEPS, board.score(a), board.score(b), strict=True)
    return next((step for step, mine, other in parts if mine != other), "by PCI order")


def _kind(link: Link) -> str:
    return f"{link.kind}{link.count or ''}{'' if link.p2p else ' without P2P'}"


def _what_it_is(board: _Scoreboard, chosen: Places) -> str:
    rings, gbps = board.rings(chosen), board.bandwidth_gbps(chosen)
    if len(chosen) == 1:
        text = "one GPU, which needs no ring"
    elif not rings:
        text = f"slowest link of the ring {_kind(board.slowest_of_ring(chosen))}"
    elif board.switched:
        text = f"{rings} NVLinks from each GPU to the switch"
    else:
        text = f"{rings} link-disjoint NVLink ring{'s' * (rings > 1)}"
    speed = "" if gbps is None else f" ({gbps:g} GB/s{' measured' if board.measured else ''})"
    nodes = {board.gpus[v].numa for v in chosen}
    return f"{text}{speed}" + ("" if nodes == {()} else f"; {len(nodes)} NUMA node{'s' * (len(nodes) > 1)}")
