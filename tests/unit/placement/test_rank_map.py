"""The map of ranks to GPUs against every other one."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from launch.machine.topology import Gpu, Link
from launch.placement.rank_map import GAIN, describe_gain, link_speeds, loads, map_ranks, step_s
from launch.placement.selection import ring_order
from launch.placement.traffic import Exchange, PartTraffic, Traffic, flows
from tests.unit.machines import linked
from tests.unit.placement.test_selection import DGX1, MIXED, TREE8, machine, uniform

MB = 10**6


def slices(count):
    part = PartTraffic(exchanges=(), sums_bytes=400 * MB, gradient_bytes=110 * MB)
    return Traffic(parts=(part,) * count)


def stages(count, *, tied_mb=0):
    sent = [[Exchange(part=number, bytes=40 * MB)] for number in range(1, count)]
    sent[0].append(Exchange(part=count - 1, bytes=tied_mb * MB))
    gradients = [110 * MB // number for number in range(1, count + 1)]
    both = zip([*map(tuple, sent), ()], gradients, strict=True)
    return Traffic(parts=tuple(PartTraffic(exchanges=own, sums_bytes=0, gradient_bytes=size) for own, size in both))


TRAFFICS = (slices(1), slices(2), slices(4), stages(2), stages(4, tied_mb=90))


def grid16():
    """Two boards of DGX-1, between which is PCIe: 16 GPUs."""
    board = machine([row.split()[:8] for row in DGX1.split("\n")[1:9]])
    far = Link(kind="SYS", gbps=10.0)
    rows = [(*row, *(far,) * 8) for row in board.links] + [(*(far,) * 8, *row) for row in board.links]
    return replace(board, gpus=tuple(Gpu(index=i) for i in range(16)), links=tuple(rows))


EIGHT = {name: machine(text) for name, text in (("dgx1", DGX1), ("tree", TREE8), ("mixed", MIXED))}


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


def mapped(topology, traffic, ring):
    """The speeds, what is sent, and the order of the map, against that of the ring."""
    gpus = [gpu.index for gpu in topology.gpus]
    sent = flows(traffic, len(gpus))
    speeds = link_speeds(topology, gpus)
    order = map_ranks(topology, ring, sent)
    assert sorted(order) == gpus
    return speeds, loads(sent), [gpus.index(gpu) for gpu in order]


@pytest.mark.parametrize("name", EIGHT)
def test_no_order_is_better_by_more_than_what_counts(name):
    topology = EIGHT[name]
    for traffic in TRAFFICS:
        speeds, sent, order = mapped(topology, traffic, ring_order(topology, range(8)))
        assert cost(speeds, sent, order) <= GAIN * (1 + 1e-9) * least_cost(speeds, sent)


def test_two_stages_on_two_boards_of_eight_stay_on_nvlink():
    speeds, sent, order = mapped(grid16(), stages(2), tuple(range(16)))
    assert cost(speeds, sent, range(16)) / cost(speeds, sent, order) > 2.4


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
    alike = uniform(8, "PIX")
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
    speeds = link_speeds(replace(EIGHT["tree"], links=tuple(map(tuple, links))), range(8))
    assert speeds[0][1] == speeds[6][7] / 2 == 12.0


def test_speeds_that_were_measured_a_tenth_apart_are_one_and_others_decide():
    gbps = {(0, 1): 30.0, (0, 2): 22.0, (0, 3): 21.0, (1, 2): 20.5, (1, 3): 20.0, (2, 3): 31.0}
    odd = {pair: Link(kind="PIX", gbps=speed, p2p=False) for pair, speed in gbps.items()}
    measured = replace(linked(4, odd=odd), measured=True)
    assert {speed for row in link_speeds(measured, range(4)) for speed in row} == {0.0, 22.0, 31.0}
    order = map_ranks(measured, (0, 2, 1, 3), flows(slices(2), 4))
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset((0, 1)), frozenset((2, 3))}
    assert step_s(measured, (0, 1, 2, 3), flows(slices(2), 4)) == pytest.approx(0.4 / 30 + 0.11 / 20)
