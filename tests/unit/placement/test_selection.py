import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import SelectionError, TopologyError
from launch.machine.topology import Gpu, Link, Nic, Topology
from launch.placement.rings import disjoint_rings
from launch.placement.selection import ring_order, select
from tests.unit.machines import linked, refusal_of

PCIE_GBPS = {"SYS": 10.0, "NODE": 24.0, "PHB": 24.0, "PXB": 24.0, "PIX": 24.0}

DGX1 = """
X   NV1 NV1 NV2 NV2 SYS SYS SYS   PIX SYS PHB SYS
NV1 X   NV2 NV1 SYS NV2 SYS SYS   PIX SYS PHB SYS
NV1 NV2 X   NV2 SYS SYS NV1 SYS   PHB SYS PIX SYS
NV2 NV1 NV2 X   SYS SYS SYS NV1   PHB SYS PIX SYS
NV2 SYS SYS SYS X   NV1 NV1 NV2   SYS PIX SYS PHB
SYS NV2 SYS SYS NV1 X   NV2 NV1   SYS PIX SYS PHB
SYS SYS NV1 SYS NV1 NV2 X   NV2   SYS PHB SYS PIX
SYS SYS SYS NV1 NV2 NV1 NV2 X     SYS PHB SYS PIX
"""
TREE8 = """
X    PIX  NODE NODE SYS  SYS  SYS  SYS    SYS
PIX  X    NODE NODE SYS  SYS  SYS  SYS    SYS
NODE NODE X    PXB  SYS  SYS  SYS  SYS    SYS
NODE NODE PXB  X    SYS  SYS  SYS  SYS    SYS
SYS  SYS  SYS  SYS  X    PIX  PHB  PHB    NODE
SYS  SYS  SYS  SYS  PIX  X    PHB  PHB    NODE
SYS  SYS  SYS  SYS  PHB  PHB  X    PIX    PIX
SYS  SYS  SYS  SYS  PHB  PHB  PIX  X      PIX
"""
# Four GPUs in a ring with one bond of two, two with a bond of four, and two on PCIe alone.
MIXED = """
X   NV1 SYS NV1 SYS PHB SYS SYS   PIX
NV1 X   NV2 SYS SYS SYS PIX SYS   SYS
SYS NV2 X   NV1 SYS SYS SYS NODE  SYS
NV1 SYS NV1 X   SYS SYS SYS SYS   PHB
SYS SYS SYS SYS X   NV4 SYS PXB   SYS
PHB SYS SYS SYS NV4 X   SYS SYS   SYS
SYS PIX SYS SYS SYS SYS X   PIX   NODE
SYS SYS NODE SYS PXB SYS PIX X    NODE
"""


def link(word, nvlink_gbps=20.0):
    """As nvidia-smi spells it; NV2- is one without P2P."""
    if word.endswith("-"):
        return replace(link(word.removesuffix("-"), nvlink_gbps), p2p=False)
    if word.startswith("NV"):
        count = int(word[2:])
        return Link(kind="NV", count=count, gbps=nvlink_gbps and count * nvlink_gbps)
    return Link(kind=word, gbps=PCIE_GBPS.get(word))


def machine(table, *, numa=(), name=None, nvlink_gbps=20.0):
    """A topology from rows of words: links to the GPUs, then to NICs."""
    rows = [line.split() for line in table.strip().splitlines()] if isinstance(table, str) else table
    size = len(rows)
    return Topology(
        source="a test",
        gpus=tuple(Gpu(index=i, numa=numa[i : i + 1], name=name, pci=f"0000:{i:02x}:00.0") for i in range(size)),
        links=tuple(tuple(link(word, nvlink_gbps) for word in row[:size]) for row in rows),
        nics=tuple(
            Nic(name=f"mlx5_{number}", links=tuple(map(link, words)))
            for number, words in enumerate(zip(*(row[size:] for row in rows), strict=True))
        ),
    )


def uniform(size, word, **changes):
    return machine([["X" if a == b else word for b in range(size)] for a in range(size)], **changes)


MACHINES = {
    "dgx1": machine(DGX1, numa=(0, 0, 0, 0, 1, 1, 1, 1)),
    "tree": machine(TREE8, numa=(0, 0, 0, 0, 1, 1, 1, 1)),
    "mixed": machine(MIXED, numa=(0, 1, 0, 1, 2, 2, 1, 0)),
}


class Brute:
    """Every answer by trying everything, straight from the rules."""

    POINTS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX")  # ten points for each place

    def __init__(self, topology):
        self.topology = topology
        self.rings = functools.cache(self.rings)
        self.ring = functools.cache(self.ring)
        self.links = functools.cache(self.links)

    def points(self, a, b):
        return self.points_of(self.topology.links[a][b])

    def points_of(self, link):
        if not link.p2p:
            return 5 * self.POINTS.index(link.kind if link.kind in self.POINTS else "PIX")
        return link.count * 100 if link.kind == "NV" else self.POINTS.index(link.kind) * 10

    def cycles(self, places):
        """Every ring, in both directions, as its sequence from the first place on."""
        first, *others = sorted(places)
        return [(first, *order) for order in itertools.permutations(others)]

    def hops(self, cycle):
        closed = [*cycle, cycle[0]] if len(cycle) > 2 else cycle
        return [tuple(sorted(hop)) for hop in itertools.pairwise(closed)]

    def nvlinks(self, places):
        bonds = {pair: self.topology.links[pair[0]][pair[1]] for pair in itertools.combinations(sorted(places), 2)}
        return {pair: bond.count for pair, bond in bonds.items() if bond.kind == "NV" and bond.p2p}

    def nvlink_rings(self, places):
        rings = {frozenset(self.hops(cycle)) for cycle in self.cycles(places)} if len(places) > 1 else ()
        return [ring for ring in rings if ring <= self.nvlinks(places).keys()]

    def rings(self, places):
        counts = self.nvlinks(places)
        if not self.nvlink_rings(places) or len(places) == 2:
            return sum(counts.values()) if len(places) == 2 else 0
        own = [[count for pair, count in counts.items() if place in pair] for place in places]
        return max(n for n in range(1, 99) if all(sum(min(count, n) for count in of_one) >= 2 * n for of_one in own))

    def ring(self, places):
        def quality(cycle):
            weights = [self.points(*hop) for hop in self.hops(cycle)] or [0]
            return min(weights), sum(weights), tuple(-place for place in cycle)

        return max(self.cycles(places), key=quality)

    def slowest(self, places):
        return min((self.points(*hop) for hop in self.hops(self.ring(places))), default=0)

    def links(self, places):
        rings = self.rings(places) if places else 0
        pairs = sum(self.points(a, b) for a, b in itertools.combinations(places, 2))
        return rings, 0 if rings or not places else min(self.slowest(places), 100), pairs

    def score(self, places, free):
        gpus, nics = self.topology.gpus, self.topology.nics
        return (
            self.links(places),
            -len({gpus[place].numa for place in places}),
            sum(max((self.points_of(nic.links[place]) for nic in nics), default=0) for place in places),
            self.links(tuple(sorted(set(free) - set(places)))),
        )

    def ranked(self, free, k):
        """All sets, the best first; free is in PCI order."""
        return sorted(itertools.combinations(free, k), key=lambda places: self.score(places, free), reverse=True)

    def bandwidth_gbps(self, places):
        if len(places) < 2:
            return None
        if self.rings(places):
            return self.rings(places) * 20.0
        slowest = self.slowest(places)
        links = [link for row in self.topology.links for link in row if self.points_of(link) == slowest]
        (speed,) = {link.gbps if link.p2p else None for link in links}
        return speed


def check(brute, free, k, selection):
    """Everything but the words of an answer, for a machine whose positions are indices in PCI order."""
    ranked = brute.ranked(free, k)
    wanted = [ranked[0], *([ranked[1], ranked[-1]] if len(ranked) > 1 else [None, None])]
    for choice, places in zip((selection.best, selection.runner_up, selection.worst), wanted, strict=True):
        assert (choice and choice.gpus) == places
        if choice:
            assert choice.ring == brute.ring(places)
            assert choice.bandwidth_gbps == brute.bandwidth_gbps(places)


def without(topology, busy):
    """The machine while these GPUs are busy."""
    gpus = tuple(replace(gpu, unusable="busy" if gpu.index in busy else gpu.unusable) for gpu in topology.gpus)
    return replace(topology, gpus=gpus)


@pytest.mark.parametrize("name", MACHINES)
def test_is_the_best_for_every_k_while_some_are_busy(name):
    topology = MACHINES[name]
    brute = Brute(topology)
    for mask in range(0, 255, 7):
        busy = [place for place in range(8) if mask >> place & 1]
        free = [place for place in range(8) if place not in busy]
        for k in range(1, len(free) + 1):
            check(brute, free, k, select(without(topology, busy), k))


@st.composite
def machines(draw, words=("SYS", "NODE", "PHB", "PXB", "PIX", "PIX-", "NV1", "NV1", "NV2", "NV2-", "NV3")):
    size = draw(st.integers(1, 6))
    sets = [words, ("SYS", "NV1"), ("NV1", "NV2"), ("PIX", "SYS"), ("NV1", "PIX")]
    some = st.sampled_from(draw(st.sampled_from(sets)))
    rows = [["X"] * size for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        rows[a][b] = rows[b][a] = draw(some)
    for row in rows:
        row.extend(["SYS"] * 2)
    for row in rows if draw(st.booleans()) else []:
        row[size:] = [draw(st.sampled_from(["SYS", "NODE", "PIX"])) for _ in range(2)]
    numa = draw(st.tuples(*[st.integers(0, 1)] * size)) if draw(st.booleans()) else ()
    return machine(rows, numa=numa)


@settings(max_examples=40)
@given(machines())
def test_is_the_best_on_any_small_machine(topology):
    brute = Brute(topology)
    size = len(topology.gpus)
    for k in range(1, size + 1):
        check(brute, range(size), k, select(topology, k))


def test_an_answer_is_in_indices_whatever_the_order_of_the_gpus():
    topology, order = MACHINES["mixed"], (3, 7, 0, 5, 1, 6, 2, 4)
    new = {old: 10 + place for place, old in enumerate(order)}
    renumbered = replace(
        topology,
        gpus=tuple(replace(topology.gpus[old], index=new[old]) for old in order),
        links=tuple(tuple(topology.links[a][b] for b in order) for a in order),
        nics=tuple(replace(nic, links=tuple(nic.links[old] for old in order)) for nic in topology.nics),
    )
    before, after = select(without(topology, [2]), 5), select(without(renumbered, [new[2]]), 5)
    for choice, other in ((before.best, after.best), (before.runner_up, after.runner_up), (before.worst, after.worst)):
        assert other.ring == tuple(new[gpu] for gpu in choice.ring)
        assert other.gpus == tuple(sorted(other.ring))
        assert ring_order(renumbered, other.gpus) == other.ring


def test_gpus_are_in_the_order_of_their_pci_addresses_and_of_their_indices_if_one_is_not_known():
    two = uniform(2, "SYS")

    def first(*addresses):
        gpus = tuple(replace(gpu, pci=address) for gpu, address in zip(two.gpus, addresses, strict=True))
        return select(replace(two, gpus=gpus), 1).best.gpus

    assert first("0000:09:00.0", "0000:08:00.0") == (1,)
    assert first("10000:01:00.0", "2000:01:00.0") == (1,)  # a domain of five digits
    assert first("0000:09:00.0", None) == (0,)


def graph(size, joined):
    return tuple(tuple(int(joined(a, b)) if a != b else 0 for b in range(size)) for a in range(size))


def test_link_disjoint_rings_of_known_graphs():
    assert disjoint_rings(graph(5, lambda *_: True)) == 2
    assert disjoint_rings(graph(6, lambda *_: 3)) == 7
    assert disjoint_rings(graph(8, lambda a, b: a ^ 1 != b)) == 3  # without a perfect matching
    assert disjoint_rings(graph(4, lambda a, b: 3 if a ^ 1 == b else 1)) == 2  # each ring takes one link of a bond
    assert disjoint_rings(graph(6, lambda a, b: a // 3 == b // 3)) == 0  # no ring joins both halves
    assert [disjoint_rings(graph(size, lambda *_: 4)) for size in (2, 1)] == [4, 0]


def test_ring_order_takes_any_gpus_in_any_order():
    dgx1 = MACHINES["dgx1"]
    assert ring_order(dgx1, range(8)) == (0, 3, 2, 1, 5, 6, 7, 4)
    assert ring_order(dgx1, {5, 1, 0, 4}) == Brute(dgx1).ring((0, 1, 4, 5))
    assert ring_order(dgx1, ()) == ()
    assert ring_order(uniform(20, "SYS"), range(20)) == tuple(range(20))  # alike, so there is nothing to search
    with pytest.raises(TopologyError, match=r"^a test: unknown GPU 8; its GPUs are 0-7"):
        ring_order(dgx1, (0, 8))


@pytest.mark.parametrize(
    ("size", "word", "name", "switch", "rings"),
    [
        (4, "NV4", None, False, 6),  # 12 links each, straight to the others
        (4, "NV4", "Tesla V100-SXM2-16GB", True, 4),  # which has six
        (4, "NV6", "NVIDIA GH200 480GB", False, 9),  # which has 18
        (3, "NV12", None, True, 12),  # 24 are too many for any GPU
        (2, "NV18", None, False, 18),
    ],
)
def test_counts_links_to_a_switch_once(size, word, name, switch, rings):
    best = select(uniform(size, word, name=name), size).best
    assert ("to the switch" in best.reason) == switch
    assert best.bandwidth_gbps == rings * 20.0


def test_a_switch_with_a_weak_port_counts_as_its_weakest():
    rows = [["X" if a == b else "NV10" if 0 in (a, b) else "NV12" for b in range(8)] for a in range(8)]
    topology = machine(rows)
    assert select(topology, 4).best.gpus == (1, 2, 3, 4)
    assert select(topology, 8).best.bandwidth_gbps == 200.0


@pytest.mark.parametrize(("count", "gbps"), [(1, 50.0), (3, None)])  # one speed is not known: each link counts alike
def test_faster_nvlinks_win_over_more_rings(count, gbps):
    pairs = {(0, 1): link("NV2"), (2, 3): Link(kind="NV", count=count, gbps=gbps)}
    best = select(linked(4, odd=pairs), 2).best
    assert (best.gpus, best.bandwidth_gbps) == ((2, 3), gbps)


def test_speeds_are_neither_made_up_nor_rounded():
    unknown = select(machine(DGX1, nvlink_gbps=None), 4).best
    assert unknown.bandwidth_gbps is None
    assert unknown.reason.startswith("2 link-disjoint NVLink rings; ")
    assert select(uniform(2, "NV18", nvlink_gbps=20.6), 2).best.bandwidth_gbps == 370.8


@pytest.mark.parametrize(
    ("gpus", "k", "busy", "message"),
    [
        (2, 0, (), "cannot choose 0 GPUs; ask for at least 1"),
        (4, 3, (2, 1), "a test: cannot choose 3 of 4 GPUs, 2 are free (GPU 1: busy; GPU 2: busy); ask for at most 2,"),
        (1, 1, (0,), "a test: cannot choose 1 of 1 GPUs, 0 are free (GPU 0: busy); choose another host, or free some"),
        (17, 2, (), "a test: 17 free GPUs are more sets than can be compared; name at most 16 to choose from with --g"),
    ],
)
def test_says_what_to_do_when_it_cannot_choose(gpus, k, busy, message):
    machine = without(uniform(gpus, "SYS"), busy)
    assert refusal_of(SelectionError, lambda: select(machine, k)).startswith(message)


def test_says_why():
    four = select(MACHINES["dgx1"], 4)
    assert four.best.reason == (
        "2 link-disjoint NVLink rings (40 GB/s); 1 NUMA node; leaves 4,5,6,7. Before 4,5,6,7 by PCI order."
    )
    assert four.worst.reason == (
        "slowest link of the ring SYS (10 GB/s); 2 NUMA nodes. Behind 0,1,2,3 by NVLink rings."
    )


@pytest.mark.parametrize(
    ("topology", "k", "words"),
    [
        (MACHINES["dgx1"], 8, "2 NUMA nodes. There is no other choice: these are all that are free."),
        (MACHINES["tree"], 2, "ring PIX (24 GB/s); 1 NUMA node; leaves 0,1,2,3,4,5. Before 4,5 by nearer NICs."),
        (
            uniform(4, "NV12", numa=(0, 1, 0, 1)),
            2,
            "12 NVLinks from each GPU to the switch (240 GB/s); 1 NUMA node; leaves 1,3. Before 1,3 by PCI order.",
        ),
        (uniform(3, "NV4-"), 2, "slowest link of the ring NV4 without P2P; leaves 2. Before 0,2 by PCI order."),
        (uniform(3, "SYS"), 1, "one GPU, which needs no ring; leaves 1,2. "),
    ],
)
def test_says_what_else_decides(topology, k, words):
    assert words in select(topology, k).best.reason
