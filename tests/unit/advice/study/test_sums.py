import pytest

from launch.advice.study.bandwidth import ROUNDS, compare_sums
from launch.placement.allreduce import TWO_LEVEL, USUAL, winner
from tests.unit.machines import hosts


@pytest.fixture
def measured(capsys):
    """Jobs of ways that take so many ms, 100 if not told, None if they fail; their names in turn are kept."""
    names = []

    def compared(where, **by_name):
        def measure(name, variables, words):
            names.append(name)
            assert words == ["--over", "two-level" if name == TWO_LEVEL else "ours"]
            ms = by_name.get(name.split()[0], 100)
            return None if ms is None else (ms / 1e3,) * 3

        return compare_sums(where, 4096, measure, on_gpus=False)

    compared.names = names
    return compared


def test_rounds_turn_and_ways_that_are_far_behind_stop(measured):
    sums = measured(hosts(h1=2), tree=160, ring=90)
    assert winner(sums) == "ring"
    first = measured.names[:6]
    assert first[0] == USUAL
    kept = [name for name in first if not name.startswith("tree")]
    assert measured.names[6:] == [*reversed(kept), *kept]
    assert {way.name: len(way.rounds_s) for way in sums.ways}["tree (reduce, broadcast)"] == 1
    assert len(sums.ways[0].rounds_s) == ROUNDS


def test_a_way_that_fails_is_left_out_and_the_usual_one_is_needed(measured):
    sums = measured(hosts(h1=2, h2=2), ring=None)
    assert not {"ring", "ring in segments"} & {way.name for way in sums.ways}
    assert {TWO_LEVEL, "two-level, MPI's"} <= {way.name for way in sums.ways}
    assert measured(hosts(h1=2), the=None) is None


def test_hosts_with_unlike_ranks_have_no_two_levels_of_ours(measured):
    assert TWO_LEVEL not in {way.name for way in measured(hosts(h1=2, h2=1)).ways}
