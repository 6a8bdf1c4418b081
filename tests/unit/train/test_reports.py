import math

import pytest
import torch

from hvdtrain.checkpoint.save_points import Decision
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.record.gauges import Gauges
from hvdtrain.train.finite import Skipped, Spike
from hvdtrain.train.reports import MOST_CURVES, Reports, Window
from hvdtrain.train.step import StepDone
from hvdtrain.train.task import added
from tests.ranks import Rank
from tests.steps import CPU, task_of
from tests.unit.train.reported import report_of

SPIKE = Spike(step=3, rank=1, loss=9.0, usual=1.0)


class Together:
    """Ranks that run one after the other: the sums are made when all have given their part."""

    def __init__(self, size, names):
        self.size, self.names = size, names
        self.given, self.spikes = [], [[] for _ in range(size)]

    def comm(self, rank):
        asked = []

        def answers(value):
            asked.append(value)
            return self.names if len(asked) == 1 else self.spikes

        def total(values):
            self.given.append(values.clone())
            return torch.stack(self.given).sum(0)

        return Rank(rank, self.size, answers=answers, sums=total)


def fixed(**readings):
    found = Gauges(lambda: readings, period_s=1e6)
    found._last = readings
    return found


def reports_of(comm, gauges):
    return Reports(comm, gauges, task_of(), every_steps=20, device=CPU)


def report(reports, window, **changes):
    facts = {"step": 20, "lr": 0.1, "grad_norm": 2.5, "loss_scale": 1.0, "end": None}
    facts |= {"visited": 40, "decision": Decision(save=False, leave=False)}
    return reports.report(window, **{**facts, **changes})


def window_of(*, loss, right, count, visited=None, spikes=()):
    window = Window()
    done = StepDone(totals={"loss": loss, "count": count, "right": right}, skipped=None)
    window.add(1, done, count=count if visited is None else visited)
    window.spikes += spikes
    return window


def test_the_last_rank_of_three_sees_everybodys_numbers(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    together = Together(3, [["a", "b"], [], ["c"]])
    read = [{"a": 1.0, "b": math.nan}, {}, {"c": 3.0}]
    # a loss that float32 would round
    losses = [2.0**30, 1.0, 3.0]
    for rank in range(3):
        clock = [100.0]
        reports = reports_of(together.comm(rank), fixed(**read[rank]))
        window = window_of(loss=losses[rank], right=rank, count=10 * (rank + 1), visited=20 * (rank + 1))
        clock[0] = 104.0
        made = report(reports, window)
    assert made.metrics == {"loss": (2.0**30 + 4.0) / 60, "accuracy": 3 / 60}
    assert made.totals == {"loss": 2.0**30 + 4.0, "count": 60, "right": 3}
    assert made.units_per_s == [5.0, 10.0, 15.0]
    assert made.hosts.keys() == {"a", "b", "c"}
    assert (made.hosts["a"], made.hosts["c"]) == (1.0, 3.0)
    assert math.isnan(made.hosts["b"])
    assert "b" not in made.scalars()
    assert made.spikes == []
    assert (made.step, made.lr, made.grad_norm, made.loss_scale) == (20, 0.1, 2.5, 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_spikes_are_gathered_where_any_rank_has_one(rank):
    together = Together(2, [[], []])
    together.spikes = [[], [{"step": 3, "rank": 1, "loss": 9.0, "usual": 1.0}]]
    other = window_of(loss=1.0, right=1, count=1, spikes=[SPIKE] if rank == 0 else [])
    report(reports_of(together.comm(1 - rank), fixed()), other)
    mine = window_of(loss=1.0, right=1, count=1, spikes=[SPIKE] if rank == 1 else [])
    made = report(reports_of(together.comm(rank), fixed()), mine)
    assert made.spikes == [SPIKE]


def test_reports_are_due_every_so_many_steps_and_at_the_last_one():
    reports = reports_of(SerialComm(), fixed())
    assert [step for step in range(1, 47) if reports.is_due(step, last=46)] == [20, 40, 46]
    assert [step for step in range(47, 93) if reports.is_due(step, last=92)] == [60, 80, 92]


def test_the_numbers_by_name():
    assert report_of().scalars() == {
        "train/loss": 0.5,
        "train/accuracy": 0.25,
        "train/lr": 0.1,
        "train/grad_norm": 2.5,
        "train/loss_scale": 1024.0,
        "train/images_per_s": 150.0,
        "train_by_rank/images_per_s_rank0": 100.0,
        "train_by_rank/images_per_s_rank1": 50.0,
        "usage/one/cpu_percent": 12.0,
    }


def test_many_ranks_are_three_curves():
    speeds = [float(speed) for speed in range(1, MOST_CURVES + 2)]
    by_rank = {name: value for name, value in report_of(units_per_s=speeds).scalars().items() if "by_rank" in name}
    assert by_rank == {
        "train_by_rank/images_per_s_slowest": 1.0,
        "train_by_rank/images_per_s_mean": 9.0,
        "train_by_rank/images_per_s_fastest": 17.0,
    }
    assert sum("by_rank" in name for name in report_of(units_per_s=speeds[:-1]).scalars()) == MOST_CURVES


def test_nothing_counted_has_no_means():
    assert all(math.isnan(value) for value in task_of().metrics({}).values())
    assert added({"loss": 1.0, "count": 2.0}, {"loss": 2.0, "count": 1.0}) == {"loss": 3.0, "count": 3.0}
    assert added({}, {"loss": 2.0}) == {"loss": 2.0}


def test_a_skipped_step_counts_as_visited_and_its_unreadable_samples_are_known():
    window = Window()
    why = Skipped(rank=1, source="loss")
    window.add(7, StepDone(totals={"loss": math.nan, "count": 5, "right": 0, "unreadable": 3}, skipped=why), count=8)
    window.add(8, StepDone(totals={"loss": 2.0, "count": 7, "right": 4, "unreadable": 1}, skipped=None), count=8)
    assert (window.steps, window.visited, window.unreadable, window.skipped) == (2, 16, 4, [(7, why)])
    assert window.totals == {"loss": 2.0, "count": 7, "right": 4, "unreadable": 1}


def test_what_happened_is_told_by_step_and_counted():
    why = Skipped(rank=1, source="loss")
    made = report_of(skipped=[(7, why)], spikes=[SPIKE], unreadable=3)
    assert made.events() == [
        {"event": "skipped", "step": 7, "rank": 1, "source": "loss"},
        {"event": "spike", "step": 3, "rank": 1, "loss": 9.0, "usual": 1.0},
    ]
    assert made.counts() == {"skipped_steps": 1, "loss_spikes": 1, "unreadable_images": 3}
