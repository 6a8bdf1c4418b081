"""Rings over weighted graphs of at most 16 vertices: the best ring, and the number of rings without a common link.

A graph is a symmetric matrix of integers, 0 for two vertices without a link; a subset of its vertices is a bit mask. A
ring visits each vertex once; two vertices joined by a link form a ring, a single vertex does not.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

MAX_VERTICES = 16  # the tables below have one entry per subset of them
# Limit of one search for rings without a common link: about half a second. Thousands of random wirings took at most
# 3,200 steps (8 GPUs with 12 links each; 3,000 for 12 GPUs with 6). A search that runs out of steps counts as
# unsuccessful.
MAX_STEPS = 100_000

Matrix = tuple[tuple[int, ...], ...]


def pair_sums(weights: Matrix) -> list[int]:
    """Return for each subset the sum of the weights of its pairs."""
    sums = [0] * (1 << len(weights))
    for mask in range(3, len(sums)):
        first, second = mask & -mask, mask & (mask - 1)
        second &= -second
        if second:  # the common part is counted twice, the pair's own weight not at all
            pair = weights[first.bit_length() - 1][second.bit_length() - 1]
            sums[mask] = sums[mask ^ first] + sums[mask ^ second] - sums[mask ^ first ^ second] + pair
    return sums


def slowest_links(weights: Matrix) -> list[int]:
    """Return for each subset the slowest link of its best ring; 0 if there is no ring."""
    slowest = [0] * (1 << len(weights))
    subsets: Sequence[int] = range(1, len(slowest))  # visited by a path
    for floor in sorted({weight for row in weights for weight in row if weight}):
        near = {1 << v: sum(1 << u for u, weight in enumerate(row) if weight >= floor) for v, row in enumerate(weights)}
        ends = [0] * len(slowest)  # the last vertices of paths from a subset's lowest vertex through all its vertices
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
        subsets = [mask for mask in subsets if ends[mask]]  # a subset without a ring has none over fewer links
    return slowest


def best_ring(weights: Matrix) -> tuple[int, ...]:
    """Return the ring through all vertices with the largest minimum weight, then largest sum, then lowest order.

    It starts at vertex 0. Every two vertices must be joined.
    """
    size = len(weights)
    floors = {weights[a][b] for a in range(size) for b in range(a)}
    if len(floors) < 2:
        return tuple(range(size))
    return next(ring for floor in sorted(floors, reverse=True) if (ring := _heaviest(weights, floor)))


def _heaviest(weights: Matrix, floor: int) -> tuple[int, ...]:
    """Maximize the sum over links of at least `floor` (Held and Karp's dynamic program, 1962); empty without a ring."""
    size = len(weights)
    near = [[weight if weight >= floor else 0 for weight in row] for row in weights]
    everyone = (1 << size) - 2
    # [mask >> 1][vertex]: the weight of the best path from a vertex through mask to vertex 0, which is never in mask.
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
    """Return the largest number of rings through all vertices without a common link; a bond of m counts as m links."""
    size = len(links)
    if size < 2:
        return 0
    if size == 2:
        return links[0][1]
    order = sorted(range(size), key=lambda v: sorted(links[v]))  # so that subsets with equal links are counted once
    return _packed(tuple(tuple(links[a][b] for b in order) for a in order))


@lru_cache(maxsize=1 << 14)
def _packed(links: Matrix) -> int:
    size = len(links)
    most = most_rings(links)
    if len({links[a][b] for a in range(size) for b in range(a)}) == 1:
        return most  # Walecki 1892: a complete graph splits into rings and at most one remaining matching
    while most and not (_may_fit(links, most) and _Search(links).finds(most)):
        most -= 1
    return most


def most_rings(links: Matrix) -> int:
    """Return an upper bound: each ring takes two links of each vertex, at most one of each bond."""
    most = min(sum(row) for row in links) // 2
    while any(sum(min(bond, most) for bond in row) < 2 * most for row in links):
        most -= 1
    return most


def _may_fit(links: Matrix, rings: int) -> bool:
    """Return whether no subset rules out this number of rings.

    Together the rings enter and leave a subset at least 2 x rings times. Each of its vertices has 2 x rings ends of
    ring links, which stay inside or go to a vertex outside; the latter takes at most 2 x rings (Tutte 1954).
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
    """Searches depth first for rings without a common link, and visits each state of the remaining links once."""

    def __init__(self, links: Matrix) -> None:
        self._links = [list(row) for row in links]  # links not used by the rings so far
        self._failed: set[Matrix] = set()
        self._steps = 0

    def finds(self, rings: int) -> bool:
        """Return whether this number of rings was found; exact if the search takes at most MAX_STEPS."""
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
            # No ring uses this bond: the rest of the search excludes it.
            self._take(start, first, left[start][first] - 1)
            if min(_spare(links[start], rings), _spare(links[first], rings)) < 0:
                break
        links[:] = map(list, left)
        self._failed.add(left)
        return False

    def _ways(self, vertex: int, others: int, start: int, rings: int) -> Iterator[None]:
        """Take in turn each path from `here` through the others to `start` that leaves enough links for the rings.

        Bonds with spare links come first, then vertices with few spare links.
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
    """Return the number of spare links of a vertex beyond the needs of the rings; negative if it has too few."""
    return sum(bond if bond < rings else rings for bond in row) - 2 * rings
