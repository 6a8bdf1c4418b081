"""The best k GPUs of a host, the order of their ring, and why.

GPUs that the topology marks as unusable, for example busy ones, are never selected. All sets of k other GPUs are
compared by these rules; a rule decides only if all rules before it give equal results:

1. NVLink rings: the number of rings over all selected GPUs that share no NVLink, times the speed of one NVLink (the
   slowest between selected GPUs; if one on the host is unknown, all count as equal). Two GPUs have as many rings as
   links in their bond. If NV# counts a GPU's links to an NVSwitch (its sum over all peers exceeds the number of links
   of the GPU), the number of rings is the smallest NV#.
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

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from launch.errors import SelectionError
from launch.machine.topology import Link, Topology, has_switch
from launch.placement.rings import MAX_VERTICES, Matrix, best_ring, disjoint_rings, most_rings, pair_sums, slowest_links

WEIGHTS = {"X": 0, "SYS": 10, "NODE": 20, "PHB": 30, "PXB": 40, "PIX": 50}
NVLINK = 100  # per link
ALIKE = 0.9  # measured speeds within this ratio are equal up to noise

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
STEPS = (  # meaning of the parts of a score, in the order of the rules
    "by NVLink rings",
    "by the slowest link of the ring",
    "by the links of all pairs together",
    "by fewer NUMA nodes",
    "by nearer NICs",
    "by what is left for the next job",
    "by what is left for the next job",
    "by what is left for the next job",
    "by PCI order",
)


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
    indifferent: bool  # all pairs of free GPUs have equal links: as far as links go, the selection does not matter


def select(topology: Topology, k: int) -> Selection:
    """Select the best `k` GPUs, excluding unusable ones.

    Raises:
        SelectionError: `k` is less than 1 or more than are free; over 16 GPUs are free.
    """
    board = _Scoreboard(topology, _in_pci_order(topology, _free(topology, k)))
    ranks = {sum(1 << v for v in chosen): -rank for rank, chosen in enumerate(combinations(range(board.size), k))}
    ranking = board.ranking(ranks, best_first=True)
    best, runner_up = next(ranking), next(ranking, None)
    worst = None if runner_up is None else next(board.ranking(ranks, best_first=False))
    return Selection(
        best=board.choice(best, _why_best(board, best, runner_up, worst)),
        runner_up=None if runner_up is None else board.choice(runner_up, _why_not(board, runner_up, best)),
        worst=None if worst is None else board.choice(worst, _why_not(board, worst, best)),
        indifferent=board.alike,
    )


def ring_order(topology: Topology, gpus: Collection[int]) -> tuple[int, ...]:
    """Return the best ring over exactly these GPUs (indices), whether free or not.

    Raises:
        SelectionError: one of them is unknown, or there are over 16 with unequal links.
    """
    _check_known(topology, gpus, "the list of GPUs")
    positions = [place for place, gpu in enumerate(topology.gpus) if gpu.index in set(gpus)]
    positions = _in_pci_order(topology, positions)
    weights = link_weights(topology, positions)
    if len(positions) > MAX_VERTICES and not _alike(weights):
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


def _check_known(topology: Topology, indices: Collection[int], what: str) -> None:
    known = sorted(gpu.index for gpu in topology.gpus)
    unknown = sorted(set(indices) - set(known))
    if unknown:
        names = ", ".join(map(str, known))
        raise SelectionError(
            f"{what} names GPU {unknown[0]}, which {topology.source} does not have; "
            f"{f'choose from {names}' if known else 'it has none'}"
        )


def _in_pci_order(topology: Topology, positions: Collection[int]) -> list[int]:
    addresses = [gpu.pci for gpu in topology.gpus if gpu.pci is not None]
    by_address = len(addresses) == len(topology.gpus)

    def key(place: int) -> tuple[int, str, int]:
        gpu = topology.gpus[place]
        address = gpu.pci or "" if by_address else ""
        return len(address), address, gpu.index  # domains past ffff have a fifth digit

    return sorted(positions, key=key)


def _weight(link: Link) -> int:
    if not link.p2p:
        return WEIGHTS.get(link.kind, WEIGHTS["PIX"]) // 2
    return NVLINK * link.count if link.kind == "NV" else WEIGHTS[link.kind]


def link_weights(topology: Topology, positions: list[int]) -> Matrix:
    """Return weights by kind and count; with measured speeds, MB/s with speeds that differ only by noise made equal."""
    table = [[topology.links[a][b] for b in positions] for a in positions]
    if not topology.measured:
        return tuple(tuple(0 if link.kind == "X" else _weight(link) for link in row) for row in table)
    levels, top = {0: 0}, 0
    for speed in sorted({_mb_per_s(link) for row in table for link in row} - {0}, reverse=True):
        top = speed if speed < ALIKE * top or not top else top
        levels[speed] = top
    return tuple(tuple(levels[_mb_per_s(link)] for link in row) for row in table)


def _mb_per_s(link: Link) -> int:
    return 0 if link.kind == "X" else max(1, round(1000 * (link.gbps or 0)))


def _alike(weights: Matrix) -> bool:
    return len({weights[a][b] for a, b in combinations(range(len(weights)), 2)}) < 2


class _Scoreboard:
    """Scores sets of the free GPUs in PCI order; a set is a bit mask."""

    def __init__(self, topology: Topology, positions: list[int]) -> None:
        self.size = len(positions)
        self.gpus = [topology.gpus[place] for place in positions]
        self.pairs = list(combinations(range(self.size), 2))
        self.table = [[topology.links[a][b] for b in positions] for a in positions]
        self.weights = link_weights(topology, positions)
        self.alike = _alike(self.weights)
        self.measured = topology.measured
        self.switched = has_switch(topology)
        self.nvlinks: Matrix = tuple(
            tuple(0 if self.measured else weight // NVLINK for weight in row) for row in self.weights
        )
        self.nics = [max((_weight(nic.links[place]) for nic in topology.nics), default=0) for place in positions]
        self.speeds = {  # of one NVLink, in MB/s
            (a, b): None if self.table[a][b].gbps is None else round(1000 * (self.table[a][b].gbps or 0) / count)
            for a, b in self.pairs
            if (count := self.nvlinks[a][b])
        }
        capped = tuple(tuple(min(weight, NVLINK) for weight in row) for row in self.weights)
        self.slowest = slowest_links(self.weights if self.measured else capped)
        self.sums = pair_sums(self.weights)
        self.rings = cache(self._rings)
        self.ring = cache(self._ring)

    def members(self, mask: int) -> list[int]:
        return [v for v in range(self.size) if mask >> v & 1]

    def links_of(self, mask: int) -> Matrix:
        chosen = self.members(mask)
        return tuple(tuple(self.nvlinks[a][b] for b in chosen) for a in chosen)

    def _rings(self, mask: int) -> int:
        """Return the exact number of NVLink rings over a set that share no link."""
        if self.slowest[mask] < NVLINK:
            return 0
        if self.switched:
            return min(self.nvlinks[a][b] for a, b in combinations(self.members(mask), 2))
        return disjoint_rings(self.links_of(mask))

    def speed(self, mask: int) -> int | None:
        """Return the MB/s of the slowest single NVLink in a set."""
        speeds = {speed for (a, b), speed in self.speeds.items() if mask >> a & mask >> b & 1}
        return None if None in speeds else min((speed for speed in speeds if speed is not None), default=None)

    def links_score(self, mask: int, *, exact: bool, high: bool) -> tuple[int, int, int]:
        """Return the score of a set by rules 1 to 3; if not exact, a cheap upper (`high`) or lower bound."""
        slowest = self.slowest[mask]
        if self.measured or slowest < NVLINK or (self.switched and not self.rings(mask)):
            return 0, slowest, self.sums[mask]
        if exact or self.switched or mask.bit_count() == 2:
            rings = self.rings(mask)
        else:
            rings = most_rings(self.links_of(mask)) if high else 1
        speed = 1 if None in self.speeds.values() else self.speed(mask) or 1
        return rings * speed, 0, self.sums[mask]

    def score(self, mask: int, rank: int = 0, *, exact: int = 2, high: bool = True) -> tuple[int, ...]:
        """Return the score by all seven rules, higher is better.

        `exact`: 0 for bounds, 1 for exact numbers of the set's rings, 2 also of the rings of the rest.
        """
        chosen = self.members(mask)
        rest = (1 << self.size) - 1 ^ mask
        return (
            *self.links_score(mask, exact=exact > 0, high=high),
            -len({self.gpus[v].numa for v in chosen}),
            sum(self.nics[v] for v in chosen),
            *self.links_score(rest, exact=exact > 1, high=high),
            rank,
        )

    def ranking(self, ranks: dict[int, int], *, best_first: bool) -> Iterator[int]:
        """Yield the sets in order; rings are counted only for sets whose bounds bring them to the front."""
        sign = -1 if best_first else 1

        def entry(mask: int, exact: int) -> tuple[tuple[int, ...], int, int]:
            score = self.score(mask, ranks[mask], exact=exact, high=best_first)
            return tuple(sign * part for part in score), exact, mask

        heap = [entry(mask, 0) for mask in ranks]
        heapq.heapify(heap)
        while heap:
            _, exact, mask = heap[0]
            if exact == 2:
                heapq.heappop(heap)
                yield mask
            else:
                heapq.heapreplace(heap, entry(mask, exact + 1))

    def _ring(self, mask: int) -> list[int]:
        chosen = self.members(mask)
        return [chosen[v] for v in best_ring(tuple(tuple(self.weights[a][b] for b in chosen) for a in chosen))]

    def slowest_of_ring(self, ring: list[int]) -> Link:
        """Return the slowest link of a ring of two or more; in a tie the one with the lowest or unknown speed."""
        links = [self.table[a][b] for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
        return min(links, key=lambda link: (0 if self.measured else _weight(link), link.gbps or 0))

    def bandwidth_gbps(self, mask: int, ring: list[int]) -> float | None:
        if len(ring) < 2:
            return None
        rings, speed = self.rings(mask), self.speed(mask)
        if not rings:
            slowest = self.slowest_of_ring(ring)
            return slowest.gbps if slowest.p2p or self.measured else None
        return None if speed is None else rings * speed / 1000

    def choice(self, mask: int, reason: str) -> Choice:
        ring = self.ring(mask)
        indices = tuple(self.gpus[v].index for v in ring)
        return Choice(
            gpus=tuple(sorted(indices)), ring=indices, bandwidth_gbps=self.bandwidth_gbps(mask, ring), reason=reason
        )

    def names(self, mask: int) -> str:
        return ",".join(str(index) for index in sorted(self.gpus[v].index for v in self.members(mask)))


def _why_best(board: _Scoreboard, best: int, runner_up: int | None, worst: int | None) -> str:
    rest = (1 << board.size) - 1 ^ best
    what = _what_it_is(board, best)
    if rest:
        same = len(board.members(best)) > 1 and _exact_links(board, best) == _exact_links(board, rest)
        what += f"; leaves {board.names(rest)}{' with the same' if same else ''}"
    if runner_up is None or worst is None:
        return f"{what}. There is no other choice: these are all that are free."
    first, last = _step(board, best, worst), _step(board, best, runner_up)
    if board.alike:
        how = "measured alike" if board.measured else f"connected alike ({_kind(board.table[0][1])})"
        return (
            f"{what}. Every two free GPUs are {how}, so as far as the links go the choice does not "
            f"matter; decided {last if first == last else f'{first} first, {last} last'}."
        )
    return f"{what}. Before {board.names(runner_up)} {last}."


def _why_not(board: _Scoreboard, mask: int, best: int) -> str:
    return f"{_what_it_is(board, mask)}. Behind {board.names(best)} {_step(board, best, mask)}."


def _step(board: _Scoreboard, a: int, b: int) -> str:
    """Describe the rule that decides between two sets."""
    parts = zip(STEPS, board.score(a), board.score(b), strict=True)
    return next((step for step, mine, other in parts if mine != other), STEPS[-1])


def _exact_links(board: _Scoreboard, mask: int) -> tuple[int, int, int]:
    return board.links_score(mask, exact=True, high=True)


def _kind(link: Link) -> str:
    return f"{link.kind}{link.count or ''}{'' if link.p2p else ' without P2P'}"


def _what_it_is(board: _Scoreboard, mask: int) -> str:
    chosen, ring = board.members(mask), board.ring(mask)
    rings, gbps = board.rings(mask), board.bandwidth_gbps(mask, ring)
    number = NUMBERS[rings] if rings < len(NUMBERS) else str(rings)
    if len(chosen) == 1:
        text = "one GPU, which needs no ring"
    elif not rings:
        none = "no NVLink ring, " if board.speeds else ""
        text = f"{none}slowest link of the ring {_kind(board.slowest_of_ring(ring))}"
    elif board.switched:
        text = f"{number} NVLink{'s' * (rings > 1)} from each GPU to the switch"
    elif len(chosen) == 2:
        text = f"{number} NVLink{'s' * (rings > 1)} between the two"
    else:
        text = f"{number} link-disjoint NVLink rings" if rings > 1 else "one NVLink ring"
    speed = "" if gbps is None else f" ({gbps:g} GB/s{' measured' if board.measured else ''})"
    nodes = {board.gpus[v].numa for v in chosen}
    numa = "" if nodes == {()} else f"; {NUMBERS[len(nodes)] if len(nodes) < 7 else len(nodes)} NUMA node"
    return f"{text}{speed}{numa}{'s' * (len(nodes) > 1 and bool(numa))}"
