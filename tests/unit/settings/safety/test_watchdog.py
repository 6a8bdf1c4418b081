from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hvdtrain.settings.safety import watchdog
from hvdtrain.settings.safety.watchdog import FIRST_STEPS, MIN_LIMIT_S, SLOW_S, RankWatchdog


class Timer:
    """A faulthandler that records the limit of each arming."""

    def __init__(self):
        self.limits = []

    def dump_traceback_later(self, timeout, *, exit, file):  # noqa: A002
        assert exit
        assert not file.closed
        self.limits.append(timeout)

    def cancel_dump_traceback_later(self):
        self.limits.append(None)


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(watchdog, "faulthandler", Timer())
    monkeypatch.setattr(watchdog, "EARLY_SHARE", 0.0)
    return watchdog.faulthandler


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(now=0.0, monotonic=lambda: watchdog.time.now))
    return watchdog.time


@pytest.fixture
def rank(tmp_path, timer):
    """Makes the watchdog of a rank, whose files are in tmp_path."""
    (tmp_path / "ranks").mkdir()
    made = []

    def make(hang_timeout_s=None, **options):
        made.append(RankWatchdog(tmp_path, 3, hang_timeout_s=hang_timeout_s, **options))
        return made[-1]

    yield make
    for dog in made:
        dog.close()


def line_in(run_folder, number=3):
    text = (run_folder / "ranks" / f"rank-{number}.at").read_bytes()
    assert len(text) == 64
    assert text.endswith(b"\n")
    return text.decode().rstrip()


def run_steps(dog, clock, durations):
    """Take steps of these durations and begin the next one."""
    for number, seconds in enumerate(durations, start=1):
        dog.begin_step(number)
        clock.now += seconds
    dog.begin_step(len(durations) + 1)


def wait(dog):
    with dog.collective():
        pass


@pytest.fixture
def dog(rank, timer, clock):
    """The watchdog of a rank in step 4, whose steps may take 7 s; the limits begin with it."""
    one = rank(7.0)
    run_steps(one, clock, [0.1] * FIRST_STEPS)
    timer.limits.clear()
    return one


# --- the line


def test_each_call_is_in_the_line(rank, tmp_path):
    dog = rank()
    assert line_in(tmp_path) == "start working"
    assert dog.step is None
    with dog.collective():
        assert line_in(tmp_path) == "start waiting"
    for step, begin, activity in (
        (1, dog.begin_step, "working"),
        (17, dog.begin_evaluation, "evaluating"),
        (1234567, dog.begin_checkpoint, "saving"),
    ):
        begin(step)
        assert line_in(tmp_path) == f"step {step} {activity}"
    assert dog.step == 1234567
    assert [file.name for file in (tmp_path / "ranks").glob("*.at*")] == ["rank-3.at"]


def test_after_a_collective_the_rank_goes_on_with_what_it_did_unless_it_fails(rank, tmp_path):
    dog = rank()
    dog.begin_evaluation(5)
    with dog.collective():
        with dog.collective():
            assert line_in(tmp_path) == "step 5 waiting"
        assert line_in(tmp_path) == "step 5 waiting"
    assert line_in(tmp_path) == "step 5 evaluating"
    with pytest.raises(RuntimeError), dog.collective():
        raise RuntimeError
    assert line_in(tmp_path) == "step 5 waiting"


def test_close_is_the_end(rank, tmp_path, timer):
    dog = rank()
    dog.begin_step(9)
    dog.close()
    assert timer.limits[-1] is None
    armed = len(timer.limits)
    wait(dog)
    assert len(timer.limits) == armed
    assert line_in(tmp_path) == "step 9 left"


def test_a_former_attempts_line_is_replaced_and_its_errors_stay(rank, tmp_path):
    first = rank()
    first.begin_step(7)
    (tmp_path / "ranks" / "rank-3.err").write_text("before\n")
    second = rank()
    assert line_in(tmp_path) == "start working"
    first.begin_step(8)
    assert line_in(tmp_path) == "start working"
    second.begin_step(9)
    assert line_in(tmp_path) == "step 9 working"
    assert (tmp_path / "ranks" / "rank-3.err").read_text() == "before\n"


def test_without_a_folder_or_a_thread_the_rank_goes_on(tmp_path, timer, monkeypatch):
    dog = RankWatchdog(tmp_path / "missing", 0, hang_timeout_s=5.0)
    dog.begin_step(1)
    monkeypatch.setattr(timer, "dump_traceback_later", Mock(side_effect=RuntimeError("no thread")))
    wait(dog)
    dog.close()
    assert timer.limits == [50.0, 50.0, None]


# --- the limits


@pytest.mark.parametrize(
    ("min_limit_s", "durations", "limit"),
    [
        (MIN_LIMIT_S, [0.1, 0.1], SLOW_S),
        (MIN_LIMIT_S, [0.1, 0.1, 0.1], MIN_LIMIT_S),
        (MIN_LIMIT_S, [400.0, 10.0, 12.0, 9.0], 110.0),  # the even median
        (MIN_LIMIT_S, [100.0] * 60 + [20.0] * 26, 200.0),
        (600.0, [0.1, 0.1, 0.1], 600.0),
    ],
)
def test_a_step_may_take_ten_times_the_median_of_the_last_50(rank, timer, clock, *, min_limit_s, durations, limit):
    run_steps(rank(min_limit_s=min_limit_s), clock, durations)
    assert timer.limits[-1] == limit


def test_a_rank_that_waits_has_a_little_more_than_the_one_it_waits_for(rank, timer, clock):
    dog = rank(7.0)
    wait(dog)
    assert timer.limits == [70.0, 70.5]
    run_steps(dog, clock, [0.1] * FIRST_STEPS)
    timer.limits.clear()
    for _ in range(2):  # the second time in the same step
        with dog.collective(), dog.collective():
            pass
    dog.begin_checkpoint(4)
    wait(dog)
    assert timer.limits == [7.5, 70.0, 70.5]


def test_the_timer_is_set_again_only_where_it_would_fire_too_early_or_too_late(rank, timer, clock, monkeypatch):
    monkeypatch.setattr(watchdog, "EARLY_SHARE", 0.01)
    dog = rank(100.0)
    run_steps(dog, clock, [0.1] * FIRST_STEPS)
    timer.limits.clear()
    for step in range(5, 25):  # 4 seconds from step 4 on
        clock.now += 0.2
        dog.begin_step(step)
    assert timer.limits == [100.0] * 4
    wait(dog)
    dog.begin_step(25)
    assert timer.limits[4:] == [100.5, 100.0]
    dog.begin_checkpoint(25)
    dog.begin_step(26)
    assert timer.limits[6:] == [1000.0, 100.0]


def test_only_the_first_batch_of_an_evaluation_may_take_longer(timer, dog):
    for _ in range(3):
        dog.begin_evaluation(4)
        wait(dog)
    dog.begin_step(5)
    dog.begin_evaluation(5)
    assert timer.limits == [70.0, 70.5, *[7.0, 7.5] * 2, 7.0, 70.0]


def test_a_rank_that_goes_on_too_late_leaves_its_line_and_its_timer_alone(timer, dog, clock, tmp_path):
    clock.now += 7.1  # stopped; its timer has not fired yet
    wait(dog)
    dog.begin_step(5)
    assert line_in(tmp_path) == "step 4 working"
    assert timer.limits == []
    dog.close()
    assert line_in(tmp_path) == "step 5 left"


def test_reading_may_take_longer_than_a_step_and_then_the_step_has_its_limit_anew(timer, dog, tmp_path):
    told = []

    def batches():
        for batch in "ab":
            told.append(line_in(tmp_path))
            yield batch

    coming = dog.time_reads(batches())
    assert next(coming) == "a"
    assert line_in(tmp_path) == "step 4 working"
    wait(dog)
    assert list(coming) == ["b"]
    assert told == ["step 4 reading"] * 2
    assert timer.limits == [70.0, 7.0, 70.5, 70.0, 7.0, 70.0, 7.0]
    assert line_in(tmp_path) == "step 4 working"


def test_where_files_are_read_the_ranks_that_wait_have_the_limit_of_reading_and_a_little_more(timer, dog):
    assert [*dog.time_reads(iter("a"))] == ["a"]
    for begin in (dog.begin_step, dog.begin_evaluation, dog.begin_evaluation, dog.begin_checkpoint):
        begin(5)
        wait(dog)
        assert timer.limits[-1] == 70.5
