from dataclasses import replace

import pytest
from torch import nn

from hvdtrain.core.phases import PHASES
from hvdtrain.core.position import Position
from hvdtrain.feed.feed import Feed
from hvdtrain.feed.order import BatchSizes
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.reports import Reports
from hvdtrain.profiling import clocks
from hvdtrain.profiling.clocks import WARMUP_STEPS, DeviceClock, HostClock
from hvdtrain.tracking.gauges import Gauges
from hvdtrain.vision.augment import Augmentations
from tests.steps import CPU, images_of, loop_of, rate_of, split, step_of, task_of


class Watch:
    """A time module whose clock the test moves."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(clocks, "time", Watch())
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


def take_steps(clock, watch, count, **seconds):
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
    take_steps(any_clock, watch, WARMUP_STEPS, read=50.0)
    assert any_clock.means() is None
    take_steps(any_clock, watch, 1, read=2.0, forward=3.0)
    take_steps(any_clock, watch, 3, read=6.0, sync=4.0)
    means = any_clock.means()
    assert means.steps == 4
    assert means.step_s == pytest.approx(8.75)
    assert means.phases_s == pytest.approx({**dict.fromkeys(PHASES, 0.0), "read": 5.0, "forward": 0.75, "sync": 3.0})


def test_the_device_is_never_waited_for_within_a_run(watch):
    stream = Stream(watch)
    device_clock = DeviceClock(stream.new_event)
    stream.done = False
    take_steps(device_clock, watch, WARMUP_STEPS + 5, forward=2.0, backward=3.0)
    stream.done = True
    take_steps(device_clock, watch, 20, forward=2.0, backward=3.0)
    assert stream.waits == 0
    assert device_clock.means().steps == 25
    stream.done = False
    take_steps(device_clock, watch, 1, forward=28.0, backward=3.0)
    assert device_clock.means().phases_s["forward"] == 3.0
    assert stream.waits == 1


def test_an_exact_clock_waits_for_the_device_at_each_border_and_counts_no_meeting_of_ranks(watch):
    waits = []

    def meet():
        watch.now += 10.0

    exact = HostClock(lambda: waits.append(watch.now), meet, unmeasured_steps=0)
    take_steps(exact, watch, 1, forward=2.0, backward=3.0)
    assert waits == [0.0, 12.0, 25.0]
    means = exact.means()
    assert (means.step_s, means.phases_s["forward"], means.phases_s["backward"]) == (5.0, 2.0, 3.0)


class Recording(HostClock):
    """Keeps the phases of each step."""

    def __init__(self):
        super().__init__(unmeasured_steps=0)
        self.steps = [[]]

    def enter(self, phase):
        super().enter(phase)
        self.steps[-1].append(phase)

    def end_step(self):
        super().end_step()
        self.steps[-1].pop()
        self.steps.append([])


PASS = ["read", "augment", "forward", "loss", "backward"]


def test_the_phases_of_each_step_in_their_order_and_a_report_after_it():
    """A real epoch: three steps of two micro-batches."""
    recording, train = Recording(), split(20, side=8)
    task = task_of(replace(images_of(train, train), height=8), augmentations=Augmentations(crop=True))
    step = step_of(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10)), task=task, phases=recording)
    sizes = BatchSizes(micro_batch=4, global_batch=8, steps_per_epoch=3)
    comm = step.slots.comm
    loop = loop_of(
        step,
        Feed(train, task, comm, sizes, seed=0, device=CPU, phases=recording),
        rate=rate_of(0.1, 3),
        limits=Limits(step, max_skipped_steps=100, check_replicas_every=0),
        reports=Reports(comm, lambda _: Gauges(dict), task, every_steps=2, device=CPU),
    )
    list(loop.steps(Position()))
    full = ["other", *PASS, *PASS, "sync", "optimizer", "other"]
    assert recording.steps == [full, [*full, "record"], [*full, "record"], []]
