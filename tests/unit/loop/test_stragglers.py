import time
from functools import partial

import pytest
import torch

from hvdtrain.core.phases import OFF
from hvdtrain.loop.stragglers import BEHIND_SHARE, LEAST_S, LEAST_STEPS, OwnTime, Stragglers, find_behind
from tests.steps import CPU

HOSTS = ["one", "one", "two", "two"]


def behind_of(own_s, hosts=HOSTS, parts=1):
    return find_behind(own_s, hosts, parts=parts, step=20, elapsed_s=10.0)


def test_the_slow_rank_is_named_with_what_it_takes_longer_than_the_median_of_the_others():
    behind = behind_of([4.0, 5.0, 5.0, 8.0])
    assert (behind.host, behind.rank, behind.ranks) == ("two", 3, "rank 3")
    assert (behind.lag_s, behind.share) == (pytest.approx(3.0), pytest.approx(0.3))


def test_a_host_is_named_where_all_its_ranks_are_late():
    behind = behind_of([4.0, 5.0, 8.0, 9.0])
    assert (behind.host, behind.rank, behind.ranks) == ("two", 2, "ranks 2 to 3")
    assert behind.lag_s == pytest.approx(4.5)
    apart = behind_of([9.0, 4.0, 8.0, 5.0], ["one", "two", "one", "two"])
    assert (apart.host, apart.ranks) == ("one", "ranks 0, 2")
    assert behind_of([4.0, 4.0, 4.0, 9.0]).ranks == "rank 3"


@pytest.mark.parametrize("own_s", [[5.0] * 4, [5.0, 5.0, 5.0, 5.0 + 10 * BEHIND_SHARE], [9.0, 9.0, 1.0, 9.0]])
def test_nobody_is_named_for_a_small_lag_or_for_being_early(own_s):
    assert behind_of(own_s) is None


def test_one_rank_has_nobody_to_wait_for_it():
    assert behind_of([5.0], ["one"]) is None


def test_parts_of_a_replica_are_compared_with_the_same_part_of_others():
    assert behind_of([1.0, 9.0, 1.0, 9.0], ["one"] * 4, parts=2) is None  # the second stage is longer, on both
    assert behind_of([1.0, 9.0, 4.0, 9.0], ["one"] * 4, parts=2).rank == 2


LATE, EVEN, LATER = [1.0, 1.0, 1.0, 3.0], [1.0] * 4, [1.0, 1.0, 1.0, 7.0]


def named(*windows, steps=LEAST_STEPS, elapsed_s=10.0):
    see = partial(Stragglers(HOSTS, parts=1).see, steps=steps, elapsed_s=elapsed_s)
    found = [see(own_s, step=number) for number, own_s in enumerate(windows)]
    return [behind and behind.rank for behind in found]


def test_who_is_late_twice_is_named_once_and_again_where_it_falls_behind_twice_as_far():
    assert named(LATE, LATE, LATE, LATER, LATER) == [None, 3, None, 3, None]
    assert named(LATE, EVEN, LATE, EVEN) == [None] * 4  # pauses
    assert named(LATE, LATE, EVEN, LATE, LATE) == [None, 3, None, None, 3]
    assert named(LATE, LATE[::-1], LATE) == [None] * 3  # ranks that are late in turn


def test_reports_of_few_or_of_quick_steps_are_taken_together():
    assert named(LATE, LATE, LATE, LATE, steps=LEAST_STEPS // 2, elapsed_s=5.0) == [None, None, None, 3]
    assert named(LATE, LATE, LATE, LATE, elapsed_s=LEAST_S / 2) == [None, None, None, 3]


class Clock:
    """A machine on which nothing takes time but what the test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step(self, clock, *, read=0.0, backward=0.0, sync=0.0, optimizer=0.0, record=0.0):
        durations = {"read": read, "backward": backward, "sync": sync, "optimizer": optimizer, "record": record}
        for phase, seconds in durations.items():
            clock.enter(phase)
            self.now += seconds
        clock.end_step()


def test_a_ranks_own_time_is_what_it_does_before_it_waits(monkeypatch):
    clock, own = Clock(monkeypatch), OwnTime(OFF, CPU)
    clock.step(own, read=1.0, backward=2.0, sync=40.0, optimizer=4.0, record=80.0)
    clock.now += 100.0  # an evaluation
    clock.step(own, backward=8.0, sync=40.0)
    assert own.pop_s() == 15.0
    assert own.pop_s() == 0.0
    clock.step(own, backward=16.0, sync=40.0)
    own.restart()
    assert own.pop_s() == 0.0


def test_a_gpus_time_is_between_events_that_it_has_passed(monkeypatch):
    clock, passed = Clock(monkeypatch), []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def query(self):
            return self.at <= passed[-1]

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = OwnTime(OFF, torch.device("cuda"))
    for _ in range(2):
        clock.step(own, backward=2.0, sync=40.0, optimizer=4.0)
    passed.append(50.0)  # the device is at the sums of the second step
    assert own.pop_s() == 8.0
    passed.append(clock.now)
    assert own.pop_s() == 4.0
    assert own.pop_s() == 0.0
