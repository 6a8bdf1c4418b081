import json
from dataclasses import asdict, replace

import pytest

from launch.errors import SelectionError, TopologyError
from launch.machine.topology import Gpu, Topology
from launch.placement import allreduce
from launch.placement.allreduce import TWO_LEVEL, USUAL, ComparedSums, TimedWay, chosen, verdict, ways, winner
from launch.placement.measured import GpuLinks, read, with_measured
from launch.placement.selection import select
from tests.unit.machines import linked, refusal_of


def links(speeds, *, host="h1", size=4, uuids=True, rest=10.0):
    """Between so many GPUs `rest` GB/s, but for these pairs."""

    def speed(a, b):
        return None if a == b else speeds.get((min(a, b), max(a, b)), rest)

    return GpuLinks(
        host=host,
        gpus=tuple(range(size)),
        uuids=tuple(f"GPU-{i}" if uuids else None for i in range(size)),
        gb_per_s=tuple(tuple(speed(a, b) for b in range(size)) for a in range(size)),
    )


def written(*hosts):
    return json.dumps({"findings": [], "bandwidth": {"gpu_links": [*map(asdict, hosts)]}})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f.json: it is not from hvdlaunch check --bandwidth --json: measure them"),
        ('{"bandwidth": {}}', "f.json: it is not from hvdlaunch check"),
        ('{"bandwidth": {"gpu_links": []}}', "f.json: no host in it has two GPUs that were measured"),
        (written(replace(links({}), gpus=(0, 1, 2))), "gpu_links[0]: expected each GPU once"),
        (written(links({(0, 1): float("nan")})), "f.json: it is not from hvdlaunch check"),
        (written(links({(0, 1): "fast"})), "expected float or null, found 'fast'"),
    ],
)
def test_other_texts_are_refused(text, problem):
    assert problem in refusal_of(TopologyError, lambda: read(text, name="f.json"))


@pytest.mark.parametrize(
    ("speeds", "gpus", "gbps", "words"),
    [
        ({(1, 3): 20.0}, (1, 3), 20.0, "slowest link of the ring SYS (20 GB/s measured); leaves 0,2."),
        # The slowest link decides before the sum.
        ({(0, 1): 20.0, (1, 2): 20.0, (0, 2): 1.0}, (0, 1, 3), 10.0, "Before 1,2,3 by PCI order."),
        # Differences by chance decide nothing.
        ({(1, 3): 10.4, (0, 1): 9.9}, (0, 1), 9.9, "by PCI order."),
    ],
)
def test_measured_speeds_decide_in_place_of_kinds(speeds, gpus, gbps, words):
    """By kind all are alike, and PCI order decides."""
    found = select(with_measured(linked(4), [links(speeds)]), len(gpus))
    assert (found.best.gpus, found.best.bandwidth_gbps) == (gpus, gbps)
    assert words in found.best.reason


def test_where_there_is_nothing_to_choose_nothing_need_be_measured():
    lost = replace(linked(2), gpus=(Gpu(index=0, unusable="unhealthy: lost"), Gpu(index=1)))
    for plain in (Topology(source="none"), linked(1), lost):
        assert with_measured(plain, [links({})], "h9") == plain


def test_gpus_that_were_not_measured_are_not_chosen():
    found = with_measured(linked(6), [links({}, size=4)])
    assert [gpu.unusable for gpu in found.gpus[4:]] == ["not measured"] * 2
    with pytest.raises(SelectionError, match="4 are free"):
        select(found, 5)


@pytest.mark.parametrize(
    ("measured", "host", "problem"),
    [
        ([links({}, host="h2")], "h1", None),  # by UUID
        ([links({}, host="h2"), links({}, host="h1", uuids=False)], "h2", None),
        ([links({}, host="h2", uuids=False)], "h1", "--measured: host h1 has other GPUs than what was measured, h2: "),
        ([links({}, uuids=False), links({}, host="h2", uuids=False)], None, "a test may be any of these: h1, h2"),
    ],
)
def test_the_right_host_is_found(measured, host, problem):
    if problem is None:
        assert with_measured(linked(4), measured, host).measured
    else:
        assert problem in refusal_of(TopologyError, lambda: with_measured(linked(4), measured, host))


TUNED = "OMPI_MCA_coll_tuned"
RING = {f"{TUNED}_use_dynamic_rules": "1", f"{TUNED}_allreduce_algorithm": "4", "OMPI_MCA_coll_han_priority": "0"}


def compared(*, on_gpus=False, hosts=("h1", "h2"), **medians):
    """By each way's name with _ for a blank: the median of each round, in ms."""
    timed = [
        TimedWay(
            name={"usual": USUAL, "two_level": TWO_LEVEL}.get(name, name.replace("_", " ")),
            rounds_s=tuple((ms / 1100, ms / 1000, ms / 900) for ms in own),
        )
        for name, own in medians.items()
    ]
    return ComparedSums(hosts=hosts, ranks=(2,) * len(hosts), on_gpus=on_gpus, bytes=16_000_000, ways=tuple(timed))


def test_the_fastest_of_those_that_gain_in_every_round_wins():
    sums = compared(usual=(100, 110, 90), ring=(80, 90, 80), recursive_doubling=(60, 120, 60), ring_in_segments=(90,))
    assert allreduce.gains(sums)["ring"] == pytest.approx((1.25, 110 / 90, 1.125))
    assert winner(sums) == "ring"
    assert "ring, 1.22 times as fast as the default (1.12 to 1.25)" in verdict(sums)


@pytest.mark.parametrize("ring", [(98, 98, 98), (90, 90, 98), (90, 90)])
def test_less_than_three_percent_in_any_round_is_no_gain(ring):
    sums = compared(usual=(100, 100, 100), ring=ring)
    assert winner(sums) is None
    assert "none is set" in verdict(sums)


def test_what_a_run_sets():
    sums = compared(usual=(100, 100), ring=(80, 80))
    settings, note = chosen(sums, {"h1": 2, "h2": 2}, {}, on_gpus=False)
    assert settings == RING
    assert "OMPI_MCA_coll_tuned_allreduce_algorithm=4" in note
    settings, note = chosen(sums, {"h1": 2, "h2": 2}, {"OMPI_MCA_coll_han_priority": "5"}, on_gpus=False)
    assert settings == {}
    assert "OMPI_MCA_coll_han_priority of your environment stays" in note
    settings, note = chosen(compared(usual=(100,), two_level=(50,)), {"h1": 2, "h2": 2}, {}, on_gpus=False)
    assert settings == {}
    assert "pass --sync two-level to the program" in note
    for ranks, on_gpus in (({"h1": 2, "h2": 1}, False), ({"h1": 2}, False), ({"h1": 2, "h2": 2}, True)):
        settings, note = chosen(sums, ranks, {}, on_gpus=on_gpus)
        assert settings == {}
        assert "over h1:2, h2:2, not over these ranks" in note


def test_gpus_have_nccls_ways():
    assert ways(on_gpus=True, hosts=1) == {USUAL: {}, "ring": {"NCCL_ALGO": "Ring"}, "tree": {"NCCL_ALGO": "Tree"}}
    assert TWO_LEVEL in ways(on_gpus=True, hosts=2)
    assert TWO_LEVEL not in ways(on_gpus=False, hosts=1)


def read_back(sums, *own_links):
    return read(json.dumps({"bandwidth": {"gpu_links": [*map(asdict, own_links)], "sums": asdict(sums)}}), name="f")


def test_what_check_has_written_is_read():
    sums, mine = compared(usual=(100, 100), ring=(80,)), links({(0, 1): 23.5})
    found = read_back(sums, mine)
    assert (found.sums, found.links) == (sums, (mine,))
    with pytest.raises(TopologyError, match=r"f: sums\.ranks: expected a number"):
        read_back(replace(sums, ranks=(2,)))


def test_other_ways_and_times_are_refused():
    foreign = {"usual": (100,), "LD_PRELOAD=x": (80,)}  # a name is not what is set
    for sums in (foreign, {"ring": (100,), "usual": (100,)}, {"usual": ()}, {"usual": (-1,)}):
        with pytest.raises(TopologyError, match=r"f: sums\.ways\S*: expected"):
            read_back(compared(**sums))
