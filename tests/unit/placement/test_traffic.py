import json
from dataclasses import replace

import pytest

from launch.errors import TopologyError
from launch.placement.traffic import Exchange, PartTraffic, Traffic, flows, on_host, read
from tests.unit.machines import refusal_of


def part(*exchanges, sums=0, gradients=0):
    return {"exchanges": [*exchanges], "sums_bytes": sums, "gradient_bytes": gradients}


def test_what_a_run_has_written_is_read():
    text = json.dumps({"parts": [part({"part": 1, "bytes": 40}, gradients=9), part(gradients=7)]})
    first = PartTraffic(exchanges=(Exchange(part=1, bytes=40),), sums_bytes=0, gradient_bytes=9)
    assert read(text, name="f") == Traffic(parts=(first, PartTraffic(exchanges=(), sums_bytes=0, gradient_bytes=7)))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "f: it is not from a run"),
        ({"parts": []}, "f: no rank in it sends anything"),
        ({"parts": [{}]}, "f.parts[0]: expected an object with exchanges"),
        ({"parts": [part(sums=1.5)]}, "f.parts[0].sums_bytes: expected int"),
        ({"parts": [part(gradients=-1)]}, "f: parts[0]: expected bytes of at least 0"),
        ({"parts": [part({"part": 0, "bytes": 4})]}, "f: parts[0]: expected bytes of at least 0, and other parts"),
    ],
)
def test_other_texts_are_refused(document, problem):
    text = document if isinstance(document, str) else json.dumps(document)
    assert problem in refusal_of(TopologyError, lambda: read(text, name="f"))


def test_stages_exchange_and_their_gradients_go_round_the_replicas():
    first = PartTraffic(exchanges=(Exchange(part=1, bytes=40),), sums_bytes=0, gradient_bytes=90)
    inside, between = flows(Traffic(parts=(first, replace(first, exchanges=(), gradient_bytes=30))), 6)
    assert inside == {pair: 40 for first in (0, 2, 4) for pair in ((first, first + 1), (first + 1, first))}
    assert between == {(0, 2): 120, (2, 4): 120, (4, 0): 120, (1, 3): 40, (3, 5): 40, (5, 1): 40}


def test_the_first_and_the_last_of_two_stages_are_neighbours():
    exchanges = (Exchange(part=1, bytes=40), Exchange(part=1, bytes=5))
    first = PartTraffic(exchanges=exchanges, sums_bytes=0, gradient_bytes=0)
    parts = (first, replace(first, exchanges=()))
    assert flows(Traffic(parts=parts), 2) == ({(0, 1): 45, (1, 0): 45}, {})


def test_slices_sum_in_a_ring_and_two_ranks_send_all_of_it_each_way():
    four = Traffic(parts=(PartTraffic(exchanges=(), sums_bytes=80, gradient_bytes=50),) * 4)
    inside, between = flows(four, 4)
    assert (inside, between) == ({(0, 1): 120, (1, 2): 120, (2, 3): 120, (3, 0): 120}, {})
    inside, between = flows(four, 8)
    assert (inside[4, 5], inside[7, 4]) == (120, 120)
    assert between == {pair: 50 for place in range(4) for pair in ((place, place + 4), (place + 4, place))}


def test_what_stays_on_a_host_is_counted_from_its_first_rank():
    flow = {(0, 1): 1.0, (3, 4): 2.0, (4, 3): 3.0, (1, 3): 4.0}
    assert on_host(flow, 3, 2) == {(0, 1): 2.0, (1, 0): 3.0}
