"""Rings over weighted graphs: the best ring, and the number of rings without a common link.

A graph is a symmetric matrix of integers, 0 for two vertices without a link; a subset of its vertices is a bit mask. A
ring visits each vertex once; two vertices joined by a link form a ring, a single vertex does not.
"""

from functools import cache
from itertools import combinations

MAX_VERTICES = 16  # the search has an entry for each subset of them

Matrix = tuple[tuple[int, ...], ...]


def are_alike(weights: Matrix) -> bool:
    """Return whether all links are equal, so that any order is a best ring."""
    return len({weights[a][b] for a, b in combinations(range(len(weights)), 2)}) < 2


def slowest_links(weights: Matrix) -> list[int]:
    """Return for each subset the slowest link of its best ring; 0 if there is no ring."""
    size = len(weights)
    if are_alike(weights):
        return [weights[0][1] if mask.bit_count() > 1 else 0 for mask in range(1 << size)]
    slowest = [0] * (1 << size)
    # [subset][vertex]: the slowest link of the best path from the lowest vertex through the others to this one.
    paths: list[dict[int, int]] = [{} for _ in slowest]
    for mask in range(1, len(slowest)):
        first, *others = (v for v in range(size) if mask >> v & 1)
        if not others:
            paths[mask][first] = max(map(max, weights))
            continue
        for v in others:
            paths[mask][v] = max(min(link, weights[u][v]) for u, link in paths[mask ^ 1 << v].items())
        slowest[mask] = max(min(link, weights[first][v]) for v, link in paths[mask].items())
    return slowest


def best_ring(weights: Matrix) -> tuple[int, ...]:
    """Return the ring through all vertices with the largest minimum weight, then largest sum, then lowest order.

    It starts at vertex 0. Every two vertices must be joined.
    """
    size = len(weights)
    if are_alike(weights):
        return tuple(range(size))
    slowest = slowest_links(weights)[-1]

    @cache
    def onward(last: int, left: int) -> tuple[int, tuple[int, ...]]:
        """Return the sum of the best path from `last` through `left` to vertex 0, and its negated vertices."""
        if not left:
            return (weights[last][0], ()) if weights[last][0] >= slowest else (-1, ())
        ahead = ((v, onward(v, left ^ 1 << v)) for v in range(size) if left >> v & 1 and weights[last][v] >= slowest)
        paths = ((weights[last][v] + rest, (-v, *path)) for v, (rest, path) in ahead if rest >= 0)
        return max(paths, default=(-1, ()))

    return (0, *(-v for v in onward(0, (1 << size) - 2)[1]))


def disjoint_rings(links: Matrix) -> int:
    """Return the number of rings through all vertices without a common link; a bond of m counts as m links.

    Each ring takes two links of each vertex, and one of a bond. No more rings fit, if there is one at all;
    the boards of NVIDIA have this number of rings, other graphs may have fewer.
    """
    if len(links) < 3 or not slowest_links(links)[-1]:
        return links[0][1] if len(links) == 2 else 0
    rings = min(map(sum, links)) // 2
    while any(sum(min(bond, rings) for bond in row) < 2 * rings for row in links):
        rings -= 1
    return rings
