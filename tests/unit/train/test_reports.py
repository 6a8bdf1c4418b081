import math

import pytest
import torch

from hvdtrain.checkpoint.save_points import Asked
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.record.gauges import Gauges
from hvdtrain.train.divergence import Spike
from hvdtrain.train.reports import MOST_CURVES, Reports, Totals, Window
from tests.unit.train.reported import report_of

CPU = torch.device("cpu")
SPIKE = Spike(step=3, rank=1, loss=9.0, usual=1.0)


class Together:
    """Ranks that run one after the other: the sums are made when all have given their part."""

    def __init__(self, size, names):
        self.size, self.names = size, names
        self.given, self.spikes = [], [[] for _ in range(size)]

    def comm(self, rank):
        one = SerialComm()
        one.rank, one.size = rank, self.size
        gathered = []

        def gather(value):
            gathered.append(value)
            return self.names if len(gathered) == 1 else self.spikes

        def total(values):
            self.given.append(values.clone())
            return torch.stack(self.given).sum(0)

        one.gather, one.sum = gather, total
        return one


def fixed(**readings):
    found = Gauges(lambda: readings, period_s=1e6)
    found._last = readings
    return found


def share(reports, window, **changes):
    facts = {"step": 20, "lr": 0.1, "grad_norm": 2.5, "loss_scale": 1.0, "end": None}
    facts |= {"visited": 40, "asked": Asked(save=False, leave=False)}
    return reports.share(window, **{**facts, **changes})


def window_of(*, loss, right, count, visited=None, spikes=()):
    window = Window()
    window.visit(count if visited is None else visited)
    window.add(loss=loss, right=right, count=count)
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
        reports = Reports(together.comm(rank), fixed(**read[rank]), every_steps=20, device=CPU)
        window = window_of(loss=losses[rank], right=rank, count=10 * (rank + 1), visited=20 * (rank + 1))
        clock[0] = 104.0
        report = share(reports, window)
    assert report.totals == Totals(loss=2.0**30 + 4.0, right=3, count=60)
    assert report.images_per_s == [5.0, 10.0, 15.0]
    assert report.hosts.keys() == {"a", "b", "c"}
    assert (report.hosts["a"], report.hosts["c"]) == (1.0, 3.0)
    assert math.isnan(report.hosts["b"])
    assert "b" not in report.scalars()
    assert report.spikes == []
    assert (report.step, report.lr, report.grad_norm, report.loss_scale) == (20, 0.1, 2.5, 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_spikes_are_gathered_where_any_rank_has_one(rank):
    together = Together(2, [[], []])
    together.spikes = [[], [{"step": 3, "rank": 1, "loss": 9.0, "usual": 1.0}]]
    other = window_of(loss=1.0, right=1, count=1, spikes=[SPIKE] if rank == 0 else [])
    share(Reports(together.comm(1 - rank), fixed(), every_steps=20, device=CPU), other)
    mine = window_of(loss=1.0, right=1, count=1, spikes=[SPIKE] if rank == 1 else [])
    report = share(Reports(together.comm(rank), fixed(), every_steps=20, device=CPU), mine)
    assert report.spikes == [SPIKE]


def test_reports_are_due_every_so_many_steps_and_at_the_last_one():
    reports = Reports(SerialComm(), fixed(), every_steps=20, device=CPU)
    assert [step for step in range(1, 47) if reports.due(step, last=46)] == [20, 40, 46]
    assert [step for step in range(47, 93) if reports.due(step, last=92)] == [60, 80, 92]


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
    by_rank = {name: value for name, value in report_of(images_per_s=speeds).scalars().items() if "by_rank" in name}
    assert by_rank == {
        "train_by_rank/images_per_s_slowest": 1.0,
        "train_by_rank/images_per_s_mean": 9.0,
        "train_by_rank/images_per_s_fastest": 17.0,
    }
    assert sum("by_rank" in name for name in report_of(images_per_s=speeds[:-1]).scalars()) == MOST_CURVES


def test_no_images_have_no_means():
    means = Totals().means()
    assert math.isnan(means.loss)
    assert math.isnan(means.accuracy)
    assert Totals(loss=1.0, right=1.0, count=2.0) + Totals(loss=2.0, right=0.0, count=1.0) == Totals(
        loss=3.0, right=1.0, count=3.0
    )
