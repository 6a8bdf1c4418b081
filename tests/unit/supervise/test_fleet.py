"""What is decided about hosts before a restart; test_restarts.py has the whole of it."""

from launch.supervise.fleet import pause_s, ranks_that_fit, usable_hosts
from tests.unit.machines import hosts, machine


def test_pauses_double_up_to_half_a_minute():
    assert [pause_s(times) for times in (1, 2, 3, 5, 6, 10_000)] == [1, 2, 4, 16, 30, 30]


def test_as_many_ranks_as_fit_are_started_in_whole_replicas():
    assert ranks_that_fit(9, np=4, min_np=2, refused=()) == 4
    assert ranks_that_fit(9, np=4, min_np=2, refused=(4,)) == 3
    assert ranks_that_fit(2, np=4, min_np=2, refused=(2,)) is None
    assert ranks_that_fit(6, np=8, min_np=1, refused=(6,), ranks_per_replica=2) == 4
    known = {"h1": machine(unusable={0: "lost"}), "h2": machine(), "h3": machine()}
    listed = hosts(h1=4, h2=4, h3=1)
    assert usable_hosts(listed, known, on_gpus=True, ranks_per_replica=2) == hosts(h1=2, h2=4)


def test_a_host_has_no_more_slots_than_free_gpus():
    lost = machine(unusable={0: "unhealthy: lost", 3: "unhealthy: lost"})
    known = {"h1": lost, "h2": lost, "h3": machine(unusable=dict.fromkeys(range(4), "x"))}
    listed = hosts(h1=4, h2=1, h3=4, unknown=1)
    assert usable_hosts(listed, known, on_gpus=True) == hosts(h1=2, h2=1)
    assert usable_hosts(listed, known, on_gpus=False) == hosts(h1=4, h2=1, h3=4)
