"""Rings over weighted graphs of at most 16 vertices: the best one, and how many share no link.

A graph is a symmetric matrix of whole numbers, 0 where two vertices are not joined; a subset of its vertices is a bit
mask. A ring passes each vertex once; two vertices joined by a link are a ring, one vertex is not.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

MAX_VERTICES = 16  # the tables below have one entry per subset of them
# Of one search for rings that share no link: about half a second. Thousands of random wirings took at most 3,200 steps
# (8 GPUs with 12 links each; 3,000 for 12 GPUs with 6). A search that runs out of steps counts as one without success.
MAX_STEPS = 100_000

Matrix = tuple[tuple[int, ...], ...]


def pair_sums(weights: Matrix) -> list[int]:
    """For each subset, the sum of the weights of its pairs."""
    sums = [0] * (1 << len(weights))
    for mask in range(3, len(sums)):
        first, second = mask & -mask, mask & (mask - 1)
        second &= -second
        if second:  # what both leave is counted twice, their own pair not at all
            pair = weights[first.bit_length() - 1][second.bit_length() - 1]
            sums[mask] = sums[mask ^ first] + sums[mask ^ second] - sums[mask ^ first ^ second] + pair
    return sums


def slowest_links(weights: Matrix) -> list[int]:
    """For each subset, the smallest weight in the ring whose smallest is largest; 0 where no ring exists."""
    slowest = [0] * (1 << len(weights))
    subsets: Sequence[int] = range(1, len(slowest))  # that a path goes through
    for floor in sorted({weight for row in weights for weight in row if weight}):
        near = {1 << v: sum(1 << u for u, weight in enumerate(row) if weight >= floor) for v, row in enumerate(weights)}
        ends = [0] * len(slowest)  # the last vertices of paths from a subset's lowest vertex through all of it
        for mask in subsets:
            low = mask & -mask
            rest = mask ^ low
            last = 0 if rest else low
            while rest:
                vertex = rest & -rest
                rest ^= vertex
                if ends[mask ^ vertex] & near[vertex]:
                    last |= vertex
            ends[mask] = last
            if last & near[low]:
                slowest[mask] = floor
        subsets = [mask for mask in subsets if ends[mask]]  # none has one over fewer links
    return slowest


def best_ring(weights: Matrix) -> tuple[int, ...]:
    """The ring through all vertices with the largest smallest weight, then the largest sum, then the lowest order.

    It starts at vertex 0. Every two vertices must be joined.
    """
    size = len(weights)
    floors = {weights[a][b] for a in range(size) for b in range(a)}
    if len(floors) < 2:
        return tuple(range(size))
    return next(ring for floor in sorted(floors, reverse=True) if (ring := _heaviest(weights, floor)))


def _heaviest(weights: Matrix, floor: int) -> tuple[int, ...]:
    """Held and Karp's dynamic program (1962), largest sum, over the links of at least `floor`; empty without a ring."""
    size = len(weights)
    near = [[weight if weight >= floor else 0 for weight in row] for row in weights]
    everyone = (1 << size) - 2
    # [mask >> 1][vertex]: the weight of the best way from a vertex through mask to vertex 0, which mask never has.
    way: list[list[int]] = [[row[0] for row in near]]
    for mask in range(2, everyone + 1, 2):
        onward = [(near[v], way[(mask ^ 1 << v) >> 1][v]) for v in range(1, size) if mask >> v & 1]
        onward = [(row, rest) for row, rest in onward if rest]
        outside = (0,) if mask == everyone else range(size)
        row_of_ways = [0] * size
        for v in outside:
            if not mask >> v & 1:
                row_of_ways[v] = max((row[v] + rest for row, rest in onward if row[v]), default=0)
        way.append(row_of_ways)
    if not way[-1][0]:
        return ()
    ring, left = [0], everyone
    while left:
        vertex = ring[-1]
        total = way[left >> 1][vertex]
        ahead = ((v, way[(left ^ 1 << v) >> 1][v]) for v in range(1, size) if left >> v & 1 and near[vertex][v])
        step = next(v for v, rest in ahead if rest and near[vertex][v] + rest == total)
        ring.append(step)
        left ^= 1 << step
    return tuple(ring)


def disjoint_rings(links: Matrix) -> int:
    """The largest number of rings through all vertices that share no link; a bond of m is m links."""
    size = len(links)
    if size < 2:
        return 0
    if size == 2:
        return links[0][1]
    order = sorted(range(size), key=lambda v: sorted(links[v]))  # so that subsets built alike are counted once
    return _packed(tuple(tuple(links[a][b] for b in order) for a in order))


@lru_cache(maxsize=1 << 14)
def _packed(links: Matrix) -> int:
    size = len(links)
    most = most_rings(links)
    if len({links[a][b] for a in range(size) for b in range(a)}) == 1:
        return most  # Walecki 1892: a complete graph splits into rings, and at most a matching that is left over
    while most and not (_may_fit(links, most) and _Search(links).finds(most)):
        most -= 1
    return most


def most_rings(links: Matrix) -> int:
    """An upper bound: each ring takes two links of each vertex, at most one of each bond."""
    most = min(sum(row) for row in links) // 2
    while any(sum(min(bond, most) for bond in row) < 2 * most for row in links):
        most -= 1
    return most


def _may_fit(links: Matrix, rings: int) -> bool:
    """Whether no subset rules out so many rings.

    Together the rings enter and leave a subset at least 2 x rings times. At each of its vertices they have 2 x rings
    ends of links, which stay inside or go to a vertex outside; that one takes at most 2 x rings (Tutte 1954).
    """
    size, ends = len(links), 2 * rings
    bonds = [[min(bond, rings) for bond in row] for row in links]
    to_subset = [[0] * size]  # [subset][vertex]
    for mask in range(1, (1 << size) - 1):
        low = mask & -mask
        row = [a + b for a, b in zip(to_subset[mask ^ low], bonds[low.bit_length() - 1], strict=True)]
        to_subset.append(row)
        outside = [count for v, count in enumerate(row) if not mask >> v & 1]
        inside = sum(row) - sum(outside)
        if sum(outside) < ends or inside + sum(min(count, ends) for count in outside) < ends * mask.bit_count():
            return False
    return True


class _Search:
    """Looks for rings that share no link: depth first, and no state of the links left over is searched twice."""

    def __init__(self, links: Matrix) -> None:
        self._links = [list(row) for row in links]  # what the rings taken so far leave
        self._failed: set[Matrix] = set()
        self._steps = 0

    def finds(self, rings: int) -> bool:
        """Whether it finds so many rings; exact if it takes no more than MAX_STEPS."""
        if not rings:
            return True
        links, left = self._links, tuple(map(tuple, self._links))
        spare = [_spare(row, rings) for row in links]
        if min(spare) < 0 or left in self._failed:
            return False
        start = spare.index(min(spare))
        neighbours = [v for v in range(len(links)) if left[start][v]]
        for first in sorted(neighbours, key=lambda v: -left[start][v]):
            self._take(start, first, 1)
            others = (1 << len(links)) - 1 ^ 1 << start ^ 1 << first
            for _ in self._ways(first, others, start, rings - 1):
                if self.finds(rings - 1):
                    return True
            # So no ring uses this bond: what follows does without it.
            self._take(start, first, left[start][first] - 1)
            if min(_spare(links[start], rings), _spare(links[first], rings)) < 0:
                break
        links[:] = map(list, left)
        self._failed.add(left)
        return False

    def _ways(self, vertex: int, others: int, start: int, rings: int) -> Iterator[None]:
        """Take, one after the other, each way from `here` through the others to `start` that leaves so many rings.

        Bonds with links to spare come first, then vertices that have few.
        """
        links = self._links
        ahead = [v for v in range(len(links)) if (others or 1 << start) >> v & 1 and links[vertex][v]]
        for step in sorted(ahead, key=lambda v: (-min(links[vertex][v], rings + 1), _spare(links[v], rings))):
            self._steps += 1
            if self._steps > MAX_STEPS:
                return
            self._take(vertex, step, 1)
            if _spare(links[vertex], rings) >= 0:
                if others:
                    yield from self._ways(step, others ^ 1 << step, start, rings)
                elif _spare(links[start], rings) >= 0:
                    yield
            self._take(vertex, step, -1)

    def _take(self, a: int, b: int, count: int) -> None:
        self._links[a][b] -= count
        self._links[b][a] -= count


def _spare(row: list[int], rings: int) -> int:
    """How many links a vertex has beyond what so many rings need; negative if it has too few."""
    return sum(bond if bond < rings else rings for bond in row) - 2 * rings
