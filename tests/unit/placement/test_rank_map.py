"""The map of ranks to GPUs against every other one."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from launch.machine.topology import Gpu, Link, Topology
from launch.placement.rank_map import GAIN, describe_gain, link_loads, link_speeds, loads, map_ranks, step_s
from launch.placement.selection import ring_order
from launch.placement.traffic import Exchange, Part, Traffic, flows
from tests.unit.placement.test_selection import DGX1, MIXED, TREE8, machine, recorded

MB = 10**6
LINK, SELF = Link(kind="PIX", gbps=24.0), Link(kind="X")


def slices(count, *, sums_mb=400, gradients_mb=110):
    part = Part(exchanges=(), sums_bytes=sums_mb * MB, gradient_bytes=gradients_mb * MB)
    return Traffic(parts=(part,) * count)


def stages(count, *, mb=40, tied_mb=0, gradients_mb=110):
    parts = [
        Part(
            exchanges=(Exchange(part=number + 1, bytes=mb * MB),) if number + 1 < count else (),
            sums_bytes=0,
            gradient_bytes=gradients_mb * MB // (number + 1),
        )
        for number in range(count)
    ]
    tied = Exchange(part=count - 1, bytes=tied_mb * MB)
    return Traffic(parts=(replace(parts[0], exchanges=(*parts[0].exchanges, tied)), *parts[1:]))


TRAFFICS = {
    "replicas": slices(1),
    "2 slices": slices(2),
    "4 slices": slices(4),
    "8 slices": slices(8),
    "2 slices, light": slices(2, sums_mb=20),
    "2 stages": stages(2),
    "4 stages": stages(4, tied_mb=90),
    "8 stages": stages(8, mb=200),
}


def grid16():
    """Two boards of DGX-1, between which is PCIe: 16 GPUs."""
    board = machine([row.split()[:8] for row in DGX1.split("\n")[1:9]])
    far = Link(kind="SYS", gbps=10.0)
    rows = [
        (*row, *(far,) * 8) if number < 8 else (*(far,) * 8, *row)
        for number, row in enumerate([*board.links, *board.links])
    ]
    return replace(board, gpus=tuple(Gpu(index=i) for i in range(16)), links=tuple(rows))


def pairs16():
    """Eight pairs on a switch each, four of them at a CPU: 16 GPUs, as in p2.16xlarge."""

    def link(a, b):
        kind = "X" if a == b else "PIX" if a // 2 == b // 2 else "PHB" if a // 8 == b // 8 else "SYS"
        return Link(kind=kind, gbps={"PIX": 24.0, "PHB": 12.0, "SYS": 6.0}.get(kind))

    rows = tuple(tuple(link(a, b) for b in range(16)) for a in range(16))
    return Topology(source="a test", gpus=tuple(Gpu(index=i) for i in range(16)), links=rows)


EIGHT = {name: machine(text) for name, text in (("dgx1", DGX1), ("tree", TREE8), ("mixed", MIXED))}
SIXTEEN = {"two boards": grid16(), "pairs": pairs16()}


def cost(speeds, flow_loads, order):
    """Written anew: of each flow the slowest link, added up."""
    return sum(max((sent / speeds[order[a]][order[b]] for (a, b), sent in own), default=0) for own in flow_loads)


def least_cost(speeds, flow_loads):
    """Of all orders, each one tried."""
    size = len(speeds)
    orders = np.array(list(itertools.permutations(range(size))))
    table = np.array(speeds)
    total = np.zeros(len(orders))
    for own in flow_loads:
        taken = [sent / table[orders[:, a], orders[:, b]] for (a, b), sent in own]
        total += np.max(taken, axis=0) if taken else 0
    return total.min()


def is_beaten(speeds, flow_loads, most):
    """Whether any order costs less than so much: each rank's place in turn, those that are alike tried once."""
    size = len(speeds)
    before = [[[(a, sent) for (a, b), sent in own if b == rank] for rank in range(size)] for own in flow_loads]
    fastest = max(max(row) for row in speeds)
    least = [max((sent for _, sent in own), default=0) / fastest for own in flow_loads]

    def alike(u, v):
        return all(speeds[u][w] == speeds[v][w] for w in range(size) if w not in (u, v))

    twin_of = [[u for u in range(v) if alike(u, v)] for v in range(size)]

    def found(order, slowest):
        rank = len(order)
        if sum(slowest) >= most * (1 - 1e-9):
            return False
        if rank == size:
            return True
        for place in range(size):
            if place in order or any(twin not in order for twin in twin_of[place]):
                continue
            new = [
                max(so_far, *(sent / speeds[order[a]][place] for a, sent in own[rank])) if own[rank] else so_far
                for so_far, own in zip(slowest, before, strict=True)
            ]
            if found([*order, place], new):
                return True
        return False

    return found([], least)


def mapped(topology, traffic, ring=None):
    """The speeds, what is sent, and the order of the map, against that of the ring."""
    gpus = [gpu.index for gpu in topology.gpus]
    sent = flows(traffic, len(gpus))
    speeds, _ = link_speeds(topology, gpus)
    order = map_ranks(topology, ring or ring_order(topology, gpus), sent)
    assert sorted(order) == gpus
    return speeds, loads(sent), [gpus.index(gpu) for gpu in order]


def fitting(topology):
    return [traffic for traffic in TRAFFICS.values() if len(topology.gpus) % len(traffic.parts) == 0]


RECORDED = [pytest.param(*one.values, id=one.id, marks=[*one.marks, pytest.mark.slow]) for one in recorded()]


@pytest.mark.parametrize("topology", [*(pytest.param(one, id=name) for name, one in EIGHT.items()), *RECORDED])
def test_no_order_is_better_by_more_than_what_counts(topology):
    for traffic in fitting(topology):
        speeds, sent, order = mapped(topology, traffic)
        assert cost(speeds, sent, order) <= GAIN * (1 + 1e-9) * least_cost(speeds, sent)


def sixteen():
    """Machines and what is sent on them for which all orders can be ruled out; those that take longer are slow."""
    soon = {("two boards", name) for name in TRAFFICS if "slices" in name} | {("pairs", "2 slices")}
    never = {(name, traffic) for name in SIXTEEN for traffic in ("2 stages", "4 stages")}
    cases = (case for case in itertools.product(SIXTEEN, TRAFFICS) if case not in never)
    return [pytest.param(*case, marks=() if case in soon else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "traffic"), sixteen())
def test_no_order_of_sixteen_is_better_by_more_than_what_counts(name, traffic):
    """Those that are the same by symmetry are tried once."""
    speeds, sent, order = mapped(SIXTEEN[name], TRAFFICS[traffic], ring=tuple(range(16)))
    assert not is_beaten(speeds, sent, cost(speeds, sent, order) / GAIN)


def test_two_stages_on_two_boards_of_eight_stay_on_nvlink():
    speeds, sent, order = mapped(SIXTEEN["two boards"], TRAFFICS["2 stages"], ring=tuple(range(16)))
    assert cost(speeds, sent, range(16)) / cost(speeds, sent, order) > 2.4


def test_the_search_of_this_file_finds_what_trying_all_finds():
    for name in ("replicas", "2 slices", "4 stages"):
        speeds, sent, _ = mapped(EIGHT["mixed"], TRAFFICS[name])
        least = least_cost(speeds, sent)
        assert not is_beaten(speeds, sent, least)
        assert is_beaten(speeds, sent, least * 1.001)


def test_slices_get_the_double_nvlinks_and_the_gain_is_told():
    traffic, gpus = slices(2), range(8)
    sent = flows(traffic, 8)
    order = map_ranks(EIGHT["dgx1"], ring_order(EIGHT["dgx1"], gpus), sent)
    pairs = [EIGHT["dgx1"].links[order[rank]][order[rank + 1]].count for rank in range(0, 8, 2)]
    assert pairs == [2, 2, 2, 2]
    assert step_s(EIGHT["dgx1"], order, sent) == pytest.approx(400e6 / 40e9 + 2 * 3 / 4 * 110e6 / 20e9)
    assert "2.00 times as fast as with ranks in order (36.5 ms)" in describe_gain(EIGHT["dgx1"], order, sent)


def test_where_the_ring_is_as_good_as_any_order_it_stays():
    ring = ring_order(EIGHT["dgx1"], range(8))
    assert map_ranks(EIGHT["dgx1"], ring, flows(slices(1), 8)) == ring
    alike = replace(EIGHT["tree"], links=tuple(tuple(LINK if a != b else SELF for b in range(8)) for a in range(8)))
    sent = flows(slices(2), 8)
    assert map_ranks(alike, (3, 1, 2, 0, 7, 6, 5, 4), sent) == (3, 1, 2, 0, 7, 6, 5, 4)
    assert "no map is faster than ranks in order" in describe_gain(alike, range(8), sent)


def test_links_without_a_known_speed_count_by_their_kind():
    bare = tuple(tuple(replace(link, gbps=None) for link in row) for row in EIGHT["dgx1"].links)
    unknown, sent = replace(EIGHT["dgx1"], links=bare), flows(slices(2), 8)
    order = map_ranks(unknown, tuple(range(8)), sent)
    assert [unknown.links[order[rank]][order[rank + 1]].count for rank in range(0, 8, 2)] == [2, 2, 2, 2]
    assert step_s(unknown, order, sent) is None
    assert "the gain is not known" in describe_gain(unknown, order, sent)


def test_a_pair_without_p2p_counts_half():
    links = [list(row) for row in EIGHT["tree"].links]
    links[0][1] = links[1][0] = replace(links[0][1], p2p=False)
    speeds, _ = link_speeds(replace(EIGHT["tree"], links=tuple(map(tuple, links))), range(8))
    assert speeds[0][1] == speeds[6][7] / 2 == 12.0


def test_speeds_that_were_measured_a_tenth_apart_are_one_and_others_decide():
    gbps = {(0, 1): 30.0, (0, 2): 22.0, (0, 3): 21.0, (1, 2): 20.5, (1, 3): 20.0, (2, 3): 31.0}
    links = [[SELF] * 4 for _ in range(4)]
    for (a, b), speed in gbps.items():
        links[a][b] = links[b][a] = Link(kind="PIX", gbps=speed, p2p=False)
    measured = Topology(
        source="a test", gpus=tuple(Gpu(index=i) for i in range(4)), links=tuple(map(tuple, links)), measured=True
    )
    assert {speed for row in link_speeds(measured, range(4))[0] for speed in row} == {0.0, 22.0, 31.0}
    order = map_ranks(measured, (0, 2, 1, 3), flows(slices(2), 4))
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset((0, 1)), frozenset((2, 3))}
    assert step_s(measured, (0, 1, 2, 3), flows(slices(2), 4)) == pytest.approx(0.4 / 30 + 0.11 / 20)


def test_what_each_link_carries():
    sent = flows(stages(2), 4)
    found = link_loads(EIGHT["dgx1"], (3, 0, 2, 1), sent)
    assert [(load.gpus, load.inside_bytes / MB, load.between_bytes / MB) for load in found] == [
        ((0, 1), 0, 55),
        ((0, 3), 40, 0),
        ((1, 2), 40, 0),
        ((2, 3), 0, 110),
    ]
