import threading
import time
from dataclasses import replace

import pytest
import torch

from hvdtrain.core.position import Position
from hvdtrain.loop.hooks import Hook
from hvdtrain.loop.save_points import AgreedSavePoints, Decision, SavePoints
from hvdtrain.ranks.comm import SerialComm
from tests.ranks import Rank
from tests.steps import loop_of
from tests.unit.loop.trainings import begun, weights

KEEP_ON = Decision(save=False, leave=False)
SAVE = Decision(save=True, leave=False)
LEAVE = Decision(save=True, leave=True)


def beside(*others, rank=0):
    """One rank together with others, which say what they are given to say."""
    return Rank(rank, 1 + len(others), others=others)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def points(comm=None, *, leave=None, **options):
    kept = {"every_s": 0.0, "every_steps": None, **options}
    return AgreedSavePoints(comm or SerialComm(), leave or threading.Event(), **kept)


def test_by_steps():
    these = points(every_steps=3)
    assert [step for step in range(1, 10) if these.decide(step)() == SAVE] == [3, 6, 9]


def test_a_save_that_is_due_within_the_first_round_is_made_where_groups_meet():
    these = points(every_steps=4)
    these.begin(8)
    assert [step for step in (13, 15, 16) if these.decide(step)() == SAVE] == [13, 16]


def test_by_the_clock_since_the_last_save(clock):
    these = points(every_s=10.0)
    assert these.decide(1)() == KEEP_ON
    clock[0] += 10.0
    assert these.decide(2)() == SAVE
    these.saved(0.5)
    assert these.decide(3)() == KEEP_ON
    clock[0] += 9.0
    these.saved(0.5)  # by steps, or by another's wish
    clock[0] += 9.0
    assert these.decide(4)() == KEEP_ON
    clock[0] += 1.0
    assert these.decide(5)() == SAVE


def test_the_next_save_is_due_as_what_the_last_one_took_asks_for(clock):
    these = points(every_s=10.0, next_s=lambda held_s: 8 * held_s)
    these.saved(0.5)
    clock[0] += 3.9
    assert these.decide(1)() == KEEP_ON
    clock[0] += 0.1
    assert these.decide(2)() == SAVE


def test_the_clock_is_rank_0s(clock):
    """Clocks are not alike, and a rank that saves alone would hang."""
    other = beside([0, 0], rank=1)
    these = points(other, every_s=10.0)
    clock[0] += 100.0
    assert these.decide(1)() == KEEP_ON
    assert points(beside([1, 0], rank=1), every_s=10.0).decide(1)() == SAVE


@pytest.mark.parametrize(
    ("others", "rank", "is_asked"),
    [(([0, 1],), 0, False), (([0, 0], [1, 1]), 0, False), (([0, 0],), 0, True), (([0, 0],), 1, True)],
)
def test_one_rank_that_was_asked_takes_all_with_it(others, rank, is_asked):
    leave = threading.Event()
    if is_asked:
        leave.set()
    assert points(beside(*others, rank=rank), leave=leave).decide(1)() == LEAVE


@pytest.mark.parametrize(("other", "rank", "wish"), [([0, 0, 0], 0, True), ([0, 0, 1], 1, False)])
def test_a_snapshot_is_taken_at_rank_0s_wish_unless_there_is_a_save(other, rank, wish):
    these = points(beside(other, rank=rank), every_steps=4)
    these.snapshot_due = lambda: wish
    decision = these.decide(3)()
    assert (decision, decision.is_any) == (replace(KEEP_ON, snapshot=True), False)
    assert these.decide(4)() == SAVE


def test_a_wish_between_question_and_answer_waits_for_the_next(clock):
    leave = threading.Event()
    these = points(leave=leave)
    answer = these.decide(1)
    leave.set()
    assert answer() == KEEP_ON
    assert these.decide(2)() == LEAVE


# --- in an epoch


class Counting(SavePoints):
    """Asks to leave at one call, if ever."""

    def __init__(self, leave_at=0):
        self.leave_at, self.calls = leave_at, 0

    def decide(self, step):
        self.calls += 1
        decision = Decision(save=self.calls == self.leave_at, leave=self.calls == self.leave_at)
        return lambda: decision


def test_an_evaluation_that_is_left_leaves_the_model_as_it_was():
    training = begun(Rank(0, 2, averages=lambda tensor: tensor.div_(2)), ema_epochs=0.0, batch_size_per_rank=3)
    list(training.epoch(Position()))
    before = weights(training)
    counting = Counting(leave_at=2)
    assert training.evaluate(18, counting) is None
    assert counting.calls == 2
    assert all(torch.equal(one, other) for one, other in zip(before, weights(training), strict=True))
    assert training.evaluate(18) is not None
    assert not all(torch.equal(one, other) for one, other in zip(before, weights(training), strict=True))


class Asking(SavePoints):
    """Asks for a snapshot at each step."""

    def decide(self, step):
        return lambda: Decision(save=False, leave=False, snapshot=True)


class Taking(Hook):
    def __init__(self):
        self.taken = []

    def snapshot(self, position, unreported):
        self.taken.append((position.step, position.visited, unreported.totals["count"]))


def test_a_snapshot_between_reports_has_what_they_do_not_have_and_cuts_none_short():
    training, taking = begun(SerialComm(), report_every_steps=3), Taking()
    loop = loop_of(
        training.step, training.feed, rate=training.lr, reports=training.reports, points=Asking(), limits=None
    )
    loop.hooks.append(taking)
    reports = list(loop.steps(Position()))
    assert [(report.step, report.steps, report.decision.snapshot) for report in reports] == [(3, 3, True), (4, 1, True)]
    assert taking.taken == [(1, 13, 13.0), (2, 26, 26.0)]
