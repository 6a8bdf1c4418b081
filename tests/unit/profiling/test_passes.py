from functools import partial

import pytest

from hvdtrain.core.phases import OFF, PHASES
from hvdtrain.profiling import clocks
from hvdtrain.profiling.clocks import DeviceClock, HostClock
from hvdtrain.profiling.passes import BLOCK_STEPS, TwoPasses, make_clock, min_steps
from tests.steps import CPU
from tests.unit.profiling.test_phases import Stream, Watch, take_steps

MEASURED = BLOCK_STEPS - 1  # of each block


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(clocks, "time", Watch())
    return clocks.time


def passes(unmeasured_steps=2, barrier=lambda: None):
    return make_clock("exact", CPU, barrier, unmeasured_steps=unmeasured_steps)


def test_a_clock_for_each_mode():
    assert make_clock("off", CPU, list) is OFF
    assert isinstance(make_clock("on", CPU, list), HostClock)
    assert isinstance(passes(), TwoPasses)


def test_the_passes_take_turns_in_blocks_that_see_the_same_machine(watch):
    one = passes(unmeasured_steps=3)
    seen = []
    for _ in range(3 + 8 * BLOCK_STEPS):
        seen.append((one.isolated, one.uniform_steps))
        take_steps(one, watch, 1, forward=1.0)
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
        take_steps(one, watch, 1, forward=fresh * (1.0 if one.isolated else 2.0), sync=0.5)


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


def test_a_block_that_is_not_at_its_end_counts_too(watch):
    one = passes()
    run(one, watch, min_steps(2) - 1)
    assert one.means().alone_s is None
    run(one, watch, 1)
    assert one.means().alone_s["forward"] == 1.0
    assert one.means() == one.means()


def test_the_error_comes_from_the_spread_over_blocks(watch):
    one = passes()
    take_steps(one, watch, 2, forward=1.0)
    for forward in (4.0, 1.0, 3.0, 6.0):  # A B B A
        take_steps(one, watch, BLOCK_STEPS, forward=forward, sync=1.0)
    # whole steps of 5 and 7 s, computation of 1 and 3 s: variances 2, n = 2 each
    assert one.means().error_s == pytest.approx((2 / 2 + 2 / 2) ** 0.5)


def test_ranks_meet_in_one_pass_alone(watch):
    meetings = []
    one = passes(unmeasured_steps=1, barrier=lambda: meetings.append(one.isolated))
    take_steps(one, watch, 1 + BLOCK_STEPS, forward=1.0)
    assert meetings == []
    take_steps(one, watch, 1, forward=1.0)
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
