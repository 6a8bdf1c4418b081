import json
from dataclasses import asdict, replace

import pytest

from launch.errors import TopologyError
from launch.placement import allreduce
from launch.placement.allreduce import TWO_LEVEL, USUAL, ComparedSums, TimedWay, chosen, verdict, ways, winner
from launch.placement.measured import read

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


def test_the_table_has_n_and_spread():
    lines = allreduce.table(compared(usual=(100, 100), ring=(80, 80))).splitlines()
    assert lines[0].split("  ")[0] == "sum of 16 MB over h1:2, h2:2"
    assert lines[2].split() == ["ring", "80", "74.5", "to", "86.7", "6", "1.25,", "1.25"]


def read_back(sums):
    return read(json.dumps({"bandwidth": {"gpu_links": [], "sums": asdict(sums)}}), name="f")


def test_what_check_has_written_is_read():
    sums = compared(usual=(100, 100), ring=(80,))
    assert read_back(sums).sums == sums
    with pytest.raises(TopologyError, match=r"f: sums\.ranks: expected a number"):
        read_back(replace(sums, ranks=(2,)))


def test_other_ways_and_times_are_refused():
    foreign = {"usual": (100,), "LD_PRELOAD=x": (80,)}  # a name is not what is set
    for sums in (foreign, {"ring": (100,), "usual": (100,)}, {"usual": ()}, {"usual": (-1,)}):
        with pytest.raises(TopologyError, match=r"f: sums\.ways\S*: expected"):
            read_back(compared(**sums))
