"""What is decided about hosts before a restart; test_supervise.py has the whole of it."""

import pytest

from launch.supervise.fleet import pause_s, ranks_that_fit, usable_hosts
from tests.unit.machines import hosts, machine

LOST = {0: "unhealthy: lost", 3: "unhealthy: lost"}


@pytest.mark.parametrize(("times", "seconds"), [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (7, 30), (10_000, 30)])
def test_pauses_double_up_to_half_a_minute(times, seconds):
    assert pause_s(times) == seconds


@pytest.mark.parametrize(
    ("room", "refused", "ranks"),
    [
        (9, (), 4),
        (4, (), 4),
        (3, (), 3),
        (2, (), 2),
        (1, (), None),
        (0, (), None),
        (9, (4,), 3),
        (3, (3,), 2),
        (2, (2,), None),
    ],
)
def test_as_many_ranks_as_fit_are_started(room, refused, ranks):
    assert ranks_that_fit(room, np=4, min_np=2, refused=refused) == ranks


def test_ranks_are_those_of_whole_replicas():
    assert ranks_that_fit(6, np=8, min_np=1, refused=(6,), ranks_per_replica=2) == 4
    assert ranks_that_fit(6, np=8, min_np=5, refused=(6,), ranks_per_replica=2) is None
    known = {"h1": machine(unusable={0: "lost"}), "h2": machine(), "h3": machine()}
    listed = hosts(h1=4, h2=4, h3=1)
    assert usable_hosts(listed, known, on_gpus=True, ranks_per_replica=2) == hosts(h1=2, h2=4)


def test_a_host_has_no_more_slots_than_free_gpus():
    listed = hosts(h1=4, h2=2, h3=4, h4=1)
    known = {
        "h1": machine(unusable=LOST),
        "h2": machine(unusable=LOST),
        "h3": machine(unusable=dict.fromkeys(range(4), "x")),
    }
    assert usable_hosts(listed, known, on_gpus=True) == hosts(h1=2, h2=2)
    assert usable_hosts(listed, known, on_gpus=False) == hosts(h1=4, h2=2, h3=4)
