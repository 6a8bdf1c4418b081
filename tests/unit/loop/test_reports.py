import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hvdtrain.core.finite import Skipped, Spike
from hvdtrain.core.pending import StepDone
from hvdtrain.insight.tracking.gauges import Gauges
from hvdtrain.loop.reports import MOST_CURVES, Reports, Window
from hvdtrain.loop.save_points import Decision
from tests.ranks import Rank, together
from tests.steps import CPU, task_of
from tests.unit.loop.reported import report_of

SPIKE = Spike(step=3, rank=1, loss=9.0, usual=1.0, samples=[4, 2])


def fixed(**readings):
    found = Gauges(lambda: readings, period_s=1e6)
    found._readings = readings
    return found


def reports_of(comm, gauges):
    return Reports(comm, gauges, task_of(), every_steps=20, device=CPU)


def report(reports, window, **changes):
    facts = {"step": 20, "lr": 0.1, "grad_norm": 2.5, "loss_scale": 1.0, "end": None}
    facts |= {"visited": 40, "decision": Decision(save=False, leave=False)}
    reports.window = window
    return reports.report(**{**facts, **changes})


def window_of(*, loss, right, count, visited=None, spikes=()):
    window = Window()
    done = StepDone(totals={"loss": loss, "count": count, "right": right}, skipped=None)
    window.add(1, done, count=count if visited is None else visited)
    window.spikes += spikes
    return window


def test_the_last_rank_of_three_sees_everybodys_numbers(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    read = [{"a": 1.0, "b": math.nan}, {}, {"c": 3.0}]
    losses = [2.0**30, 1.0, 3.0]  # float32 would round the first
    windows = [
        window_of(loss=losses[rank], right=rank, count=10 * (rank + 1), visited=20 * (rank + 1)) for rank in range(3)
    ]
    clock[0] = 104.0
    made = together(3, lambda comm: report(reports_of(comm, fixed(**read[comm.rank])), windows[comm.rank]))[-1]
    assert made.metrics == {"loss": (2.0**30 + 4.0) / 60, "accuracy": 3 / 60}
    assert made.totals == {"loss": 2.0**30 + 4.0, "count": 60, "right": 3}
    assert made.units_per_s.tolist() == [5.0, 10.0, 15.0]
    assert made.gauges == [(0, "a"), (0, "b"), (2, "c")]
    read = made.readings.tolist()
    assert (read[0], read[2]) == (1.0, 3.0)
    assert math.isnan(read[1])
    assert "b" not in made.scalars()
    assert made.spikes == []
    assert (made.step, made.lr, made.grad_norm, made.loss_scale) == (20, 0.1, 2.5, 1.0)


def test_spikes_are_counted_by_all_and_gathered_by_rank_0():
    windows = [window_of(loss=1.0, right=1, count=1, spikes=spikes) for spikes in ([], [SPIKE])]
    first, second = together(2, lambda comm: report(reports_of(comm, fixed()), windows[comm.rank]))
    assert first.loss_spikes == second.counts()["loss_spikes"] == 1
    assert (first.spikes, second.spikes) == ([SPIKE], [])


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
        "train_by_rank/own_ms_rank0": 25.0,
        "train_by_rank/own_ms_rank1": 50.0,
        "usage/one/cpu_percent": 12.0,
    }


def usage_of(usage):
    return {name: value for name, value in report_of(usage=usage).scalars().items() if name.startswith("usage/")}


def test_many_hosts_are_five_curves_for_each_gauge():
    readings = {(8 * host, f"usage/node{host}/cpu_percent"): float(host) for host in range(MOST_CURVES + 1)}
    few = dict(list(readings.items())[:-1])
    assert usage_of(few) == {name: value for (_, name), value in few.items()}
    silent = {(8 * host, f"usage/node{host}/gpu_power_w"): math.nan for host in range(MOST_CURVES + 1)}
    silent[8, "usage/node1/gpu_power_w"] = 300.0  # the others' cannot be read
    assert usage_of({**readings, **silent}) == {
        **{f"usage/cpu_percent_{name}": value for name, value in (("lowest", 0), ("mean", 8), ("highest", 16))},
        **{f"usage/cpu_percent_{name}_rank": rank for name, rank in (("lowest", 0), ("highest", 128))},
        **{f"usage/gpu_power_w_{name}": 300.0 for name in ("lowest", "mean", "highest")},
        **{f"usage/gpu_power_w_{name}_rank": 8 for name in ("lowest", "highest")},
    }


class OfGroups(Rank):
    """Rank 0 of two groups of two, which hears that of the other group."""

    sync_group = SimpleNamespace(rank=0, size=2)

    def __init__(self, *told):
        self._told = list(told)
        super().__init__(0, 4, answers=self._answer)

    def _answer(self, value):
        if isinstance(value, str):
            return ["one", "one", "two", "two"]
        return [value, None, self._told.pop(0), None] if value else [[]] * 4


def at_meetings(*other, waited_s=0.0, skipped=(), lasted_s=10.0):
    """What rank 0 reports of windows in which it has waited so long; `other` is what the other group tells in each."""
    reports = reports_of(OfGroups(*other), fixed())
    made = []
    for _ in other:
        window = window_of(loss=1.0, right=1, count=1)
        window.waited_s, window.skipped = waited_s, list(skipped)
        window.lasted_s = lambda: lasted_s
        made.append(report(reports, window))
    return made


def test_a_group_for_which_the_others_wait_is_named_with_its_lag_when_it_falls_behind():
    in_time, late = [[], 2.5, 10.0], [[], 0.5, 10.0]
    first, second, third, fourth, fifth = at_meetings(late, late, in_time, late, late, waited_s=2.5)
    assert fourth.behind is not None
    assert (first.behind.host, first.behind.rank, first.behind.share) == ("two", 2, pytest.approx(0.2, abs=0.01))
    assert second.behind is third.behind is fifth.behind is None
    (event,) = first.events()
    assert event == {"event": "behind", **asdict(first.behind)}
    assert event["ranks"] == "ranks 2 to 3"
    assert event["lag_s"] == pytest.approx(2.0, abs=0.1)
    begins, goes_on, falls_back = at_meetings([[], 0.0, 10.0], late, [[], -3.0, 10.0], waited_s=2.0)
    assert begins.behind.lag_s == pytest.approx(2.0, abs=0.1)
    assert goes_on.behind is None
    assert falls_back.behind.lag_s == pytest.approx(5.0, abs=0.1)
    (here,) = at_meetings([[], 3.0, 10.0])
    assert (here.behind.host, here.behind.rank) == ("one", 0)
    (hardly,) = at_meetings([[], 0.8, 10.0])
    assert hardly.behind is None


def test_what_each_group_has_skipped_is_told_and_what_all_have_only_once():
    mine, theirs = Skipped(rank=1, source="loss", ranks="ranks 0 to 1"), Skipped(rank=3, source="loss", ranks="2 to 3")
    (apart,) = at_meetings([[[4, asdict(theirs)], [7, asdict(theirs)]], 0.0, 10.0], skipped=[(5, mine)])
    assert apart.skipped == [(4, theirs), (5, mine), (7, theirs)]
    assert apart.counts()["skipped_steps"] == 3
    assert apart.events()[1] == {"event": "skipped", "step": 5, "rank": 1, "source": "loss", "ranks": "ranks 0 to 1"}
    why = Skipped(rank=2, source="loss")
    (together,) = at_meetings([[[5, asdict(why)]], 0.0, 10.0], skipped=[(5, why)])
    assert together.skipped == [(5, why)]


def test_a_skipped_step_counts_as_visited_and_its_unreadable_samples_are_known():
    window = Window()
    why = Skipped(rank=1, source="loss")
    window.add(7, StepDone(totals={"loss": math.nan, "count": 5, "right": 0, "unreadable": 3}, skipped=why), count=8)
    window.add(8, StepDone(totals={"loss": 2.0, "count": 7, "right": 4, "unreadable": 1}, skipped=None), count=8)
    assert (window.steps, window.visited, window.unreadable, window.skipped) == (2, 16, 4, [(7, why)])
    assert window.totals == {"loss": 2.0, "count": 7, "right": 4, "unreadable": 1}


def test_power_is_that_of_all_gpus_or_not_known():
    one, two = (0, "usage/a/gpu0_power_w"), (8, "usage/b/gpu_power_w")
    assert report_of(usage={one: 250.0, two: 300.0, (0, "usage/a/cpu_percent"): 9.0}).power_w() == 550.0
    assert report_of(usage={one: 250.0, two: math.nan}).power_w() is None
    assert report_of().power_w() is None
