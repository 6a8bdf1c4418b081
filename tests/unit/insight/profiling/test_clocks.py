from functools import partial
from types import SimpleNamespace

import pytest

from hvdtrain.core.phases import PHASES
from hvdtrain.insight.profiling import clocks
from hvdtrain.insight.profiling.clocks import WARMUP_STEPS, DeviceClock, HostClock
from hvdtrain.insight.profiling.passes import BLOCK_STEPS, TwoPasses, make_clock
from hvdtrain.insight.profiling.settings import ProfileSettings
from hvdtrain.insight.profiling.step_clock import step_clock
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.watchdog import OFF
from tests.ranks import Rank
from tests.steps import CPU

EXACT = ProfileSettings(profile="exact")


@pytest.fixture
def watch(monkeypatch):
    """A time module whose clock the test moves."""
    monkeypatch.setattr(clocks, "time", SimpleNamespace(now=0.0, perf_counter=lambda: clocks.time.now))
    return clocks.time


class Stream:
    """A device that finishes its work only when `done` is set; its events record when they were passed."""

    def __init__(self, watch):
        self.watch, self.waits, self.done = watch, 0, True

    def new_event(self):
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.at = self.stream.watch.now

    def query(self):
        return self.stream.done

    def synchronize(self):
        self.stream.waits += 1

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def run_steps(clock, watch, count, **seconds):
    """Take steps in which each phase takes these seconds, with a second between them."""
    for _ in range(count):
        for phase, duration in seconds.items():
            clock.enter(phase)
            watch.now += duration
        clock.end_step()
        watch.now += 1.0


@pytest.fixture(params=["host", "device"])
def any_clock(request, watch):
    return HostClock() if request.param == "host" else DeviceClock(Stream(watch).new_event)


def test_a_mean_step_leaves_out_the_warm_up_and_what_is_between_steps(any_clock, watch):
    run_steps(any_clock, watch, WARMUP_STEPS, read=50.0)
    assert any_clock.means() is None
    run_steps(any_clock, watch, 1, read=2.0, forward=3.0)
    run_steps(any_clock, watch, 3, read=6.0, sync=4.0)
    means = any_clock.means()
    assert means.steps == 4
    assert means.step_s == pytest.approx(8.75)
    assert means.phases_s == pytest.approx({**dict.fromkeys(PHASES, 0.0), "read": 5.0, "forward": 0.75, "sync": 3.0})


def test_the_wait_for_a_core_leaves_out_what_is_between_steps(monkeypatch, watch):
    queued_s = iter((0.0, 9.0, 9.5, 20.0, 20.5))  # at the begin of the warm-up, and at both ends of two steps
    monkeypatch.setattr(clocks, "read_queued_s", lambda: next(queued_s))
    clock = HostClock(unmeasured_steps=1)
    run_steps(clock, watch, 3, forward=2.0)
    assert clock.means().queued_s == 0.5


def test_the_device_is_never_waited_for_within_a_run(watch):
    stream = Stream(watch)
    device_clock = DeviceClock(stream.new_event)
    stream.done = False
    run_steps(device_clock, watch, WARMUP_STEPS + 5, forward=2.0, backward=3.0)
    stream.done = True
    run_steps(device_clock, watch, 20, forward=2.0, backward=3.0)
    assert stream.waits == 0
    assert device_clock.means().steps == 25
    stream.done = False
    run_steps(device_clock, watch, 1, forward=28.0, backward=3.0)
    assert device_clock.means().phases_s["forward"] == 3.0
    assert stream.waits == 1


def test_an_exact_clock_waits_for_the_device_at_each_border_and_counts_no_meeting_of_ranks(watch):
    waits = []

    def meet():
        watch.now += 10.0

    exact = HostClock(lambda: waits.append(watch.now), meet, unmeasured_steps=0)
    run_steps(exact, watch, 1, forward=2.0, backward=3.0)
    assert waits == [0.0, 12.0, 25.0]
    means = exact.means()
    assert (means.step_s, means.phases_s["forward"], means.phases_s["backward"]) == (5.0, 2.0, 3.0)


# --- two passes


MEASURED = BLOCK_STEPS - 1  # of each block


def passes(unmeasured_steps=2, barrier=lambda: None):
    return make_clock("exact", CPU, barrier, unmeasured_steps=unmeasured_steps)


def test_the_passes_take_turns_in_blocks_that_see_the_same_machine(watch):
    one = passes(unmeasured_steps=3)
    seen = []
    for _ in range(3 + 8 * BLOCK_STEPS):
        seen.append((one.isolated, one.uniform_steps))
        run_steps(one, watch, 1, forward=1.0)
    assert seen[:3] == [(False, 3), (False, 2), (False, 1)]
    blocks = [seen[3 + start * BLOCK_STEPS :][:BLOCK_STEPS] for start in range(8)]
    assert [block[0][0] for block in blocks] == [False, True, True, False, True, False, False, True]
    for block in blocks:
        assert [left for _, left in block] == list(range(BLOCK_STEPS, 0, -1))
        assert len({isolated for isolated, _ in block}) == 1


def run(one, watch, steps):
    """A forward pass takes 2 s and 1 s alone, and four times that in the first step of a block."""
    for _ in range(steps):
        fresh = 4.0 if one.uniform_steps == BLOCK_STEPS else 1.0
        run_steps(one, watch, 1, forward=fresh * (1.0 if one.isolated else 2.0), sync=0.5)


def test_each_pass_has_means_of_its_own_without_the_first_step_of_a_block(watch):
    one = passes()
    run(one, watch, 2 + BLOCK_STEPS)
    means = one.means()
    assert (means.steps, means.phases_s["forward"], means.alone_s, means.error_s) == (MEASURED, 2.0, None, None)
    run(one, watch, 2 * BLOCK_STEPS)
    means = one.means()
    assert (means.steps, means.step_s, means.phases_s["forward"]) == (MEASURED, 2.5, 2.0)
    assert means.alone_s == {**dict.fromkeys(PHASES, 0.0), "forward": 1.0, "sync": 0.5}
    assert means.error_s is None  # one block of the whole step


def test_the_error_comes_from_the_spread_over_blocks(watch):
    one = passes()
    run_steps(one, watch, 2, forward=1.0)
    for forward in (4.0, 1.0, 3.0, 6.0):  # A B B A
        run_steps(one, watch, BLOCK_STEPS, forward=forward, sync=1.0)
    # whole steps of 5 and 7 s, computation of 1 and 3 s: variances 2, n = 2 each
    assert one.means().error_s == pytest.approx((2 / 2 + 2 / 2) ** 0.5)


def test_ranks_meet_in_one_pass_alone(watch):
    meetings = []
    one = passes(unmeasured_steps=1, barrier=lambda: meetings.append(one.isolated))
    run_steps(one, watch, 1 + BLOCK_STEPS, forward=1.0)
    assert meetings == []
    run_steps(one, watch, 1, forward=1.0)
    assert meetings == [True, True]  # before the phase, and at the step's end


def test_on_a_gpu_the_whole_step_is_timed_by_events_and_each_block_is_read_at_its_end(watch):
    stream = Stream(watch)
    one = TwoPasses(partial(DeviceClock, stream.new_event), HostClock, unmeasured_steps=1)
    stream.done = False  # until it is waited for
    run(one, watch, 1 + BLOCK_STEPS)
    assert stream.waits == MEASURED
    run(one, watch, 2 * BLOCK_STEPS)
    means = one.means()
    assert (means.steps, means.phases_s["forward"], means.alone_s["forward"]) == (MEASURED, 2.0, 1.0)


def test_ranks_with_unlike_readers_alternate_at_the_same_steps(tmp_path):
    clock = step_clock(EXACT, tmp_path, Rank(0, 2, answers=[[..., 8]]), CPU, watchdog=OFF, readers=4)
    for _ in range(WARMUP_STEPS):
        clock.end_step()
    assert clock.uniform_steps == 40


def test_a_run_too_short_for_two_passes_of_many_readers_is_refused():
    job = SimpleNamespace(train=SimpleNamespace(readers=8), length_option="--epochs", steps=44)
    EXACT.check_job(job)
    job.steps -= 1
    with pytest.raises(BadInput, match="needs 44 steps"):
        EXACT.check_job(job)
