import errno
import json
import math
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.core.finite import Skipped, Spike
from hvdtrain.core.task import Task
from hvdtrain.insight.tracking import tracker as module
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.settings.safety.exits import FINISHED
from tests.unit.loop.reported import IMAGES, epoch_of, report_of

KNOWN = {"np": 2, "hosts": ["one"], "model": "efficientnet_tiny", "epochs": 2, "global_batch": 64}


@pytest.fixture
def start(tmp_path):
    """Trackers on one folder; files are left open, as by a run that ends with its process."""
    return partial(Tracker, tmp_path, is_writer=True, task=IMAGES, result=KNOWN)


SKIPPED = Skipped(rank=1, source="loss")
SPIKE = Spike(step=9, rank=0, loss=8.0, usual=1.0, samples=[*range(9)])
SETTINGS = {"ranks": 2, "recipe": "scaled", "wide": True, "init": Path("w.pt"), "begin_with": None, "seed": 0}


def first_epoch(tracker, **changes):
    tracker.record(report_of(5))
    tracker.record(report_of(10, skipped=[(7, SKIPPED)]))
    return tracker.record_epoch(epoch_of(1, **changes))


def second_epoch(tracker):
    tracker.record(report_of(20, skipped=[(12, SKIPPED), (13, SKIPPED)], spikes=[SPIKE]))
    train, test = {"loss": 0.75, "accuracy": 0.75}, {"loss": 0.5, "accuracy": 0.875}
    return tracker.record_epoch(epoch_of(2, train_s=1.0, lr=0.05, train=train, test=test))


def lines_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def events_of(folder):
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    return EventAccumulator(str(folder)).Reload()  # the run may still be going on


def test_a_report_is_a_line_and_its_events_come_before_it(start, tmp_path):
    tracker = start()
    tracker.record(report_of(5))
    tracker.record(report_of(10, skipped=[(7, SKIPPED), (8, SKIPPED)], spikes=[SPIKE]))
    first, *events, last = lines_of(tmp_path)
    skipped = {"event": "skipped", "step": 7, "rank": 1, "source": "loss"}
    spike = {"event": "spike", "step": 9, "rank": 0, "loss": 8.0, "usual": 1.0, "samples": [*range(9)]}
    assert events == [skipped, {**skipped, "step": 8}, spike]
    assert first.pop("seconds") <= last.pop("seconds")
    numbers = report_of(0).scalars()
    assert first == {"step": 5, **numbers, "train/skipped_steps": 0, "train/loss_spikes": 0}
    assert last == {"step": 10, **numbers, "train/skipped_steps": 2, "train/loss_spikes": 1}
    assert [tracker.result[name] for name in ("steps", "skipped_steps", "loss_spikes")] == [10, 2, 1]


def test_what_is_not_a_number_is_null_in_its_line(start, tmp_path):
    tracker = start()
    tracker.record(report_of(5, totals={}, grad_norm=math.inf))
    first_epoch(tracker, train={"loss": math.nan, "accuracy": math.nan})
    lines = lines_of(tmp_path)
    assert [lines[0][name] for name in ("train/loss", "train/accuracy", "train/grad_norm")] == [None] * 3
    assert [lines[-1][name] for name in ("train/loss", "train/accuracy", "train/lr")] == [None, None, 0.1]
    assert lines[-1]["eval/loss"] == 1.25


def test_an_epoch_is_a_line_at_once_and_the_result_has_the_totals(start, tmp_path):
    tracker = start()
    first_epoch(tracker)
    metrics = second_epoch(tracker)
    line = lines_of(tmp_path)[-1]
    assert line == {"step": 20, "seconds": line["seconds"], "epoch": 2, **metrics}
    assert metrics == {
        "train/loss": 0.75,
        "train/accuracy": 0.75,
        "train/lr": 0.05,
        "train/images_per_s": 600.0,
        "train/epoch_s": 1.0,
        "train/skipped_steps": 3,
        "train/loss_spikes": 1,
        "eval/loss": 0.5,
        "eval/accuracy": 0.875,
    }
    assert not (tmp_path / "result.json").exists()
    tracker.conclude(FINISHED)
    tracker.conclude("failed")  # the first reason counts
    result = result_of(tmp_path)
    assert result.pop("wall_time_s") >= 0
    assert result == {
        **KNOWN,
        **dict.fromkeys(("energy_wh", "straggler", "stopped", "checkpoint_hold_s", "memory")),  # others know them
        **dict.fromkeys(("unreadable_images", "log_write_failures", "checkpoint_write_failures", "resumed"), 0),
        "steps": 20,
        "train_time_s": 4.0,
        "train_images_per_s": 300.0,  # 1200 images in 4 seconds, not the mean of 200 and 600
        "eval_accuracy": 0.875,
        "eval_loss": 0.5,
        "best_accuracy": 0.875,
        "higher_is_better": True,
        "skipped_steps": 3,
        "loss_spikes": 1,
        "exit_reason": "finished",
    }
    assert not list(tmp_path.rglob("*.part"))


def test_a_signal_waits_for_the_result_that_is_being_written(start, tmp_path, monkeypatch):
    tracker, begun, may_write, write = start(), threading.Event(), threading.Event(), module.write_reserved

    def write_later(path, value):
        begun.set()
        may_write.wait()
        write(path, value)

    monkeypatch.setattr(module, "write_reserved", write_later)
    first, second = (threading.Thread(target=tracker.conclude, args=(why,)) for why in (FINISHED, "interrupted"))
    first.start()
    begun.wait()
    second.start()
    second.join(0.2)
    returned = not second.is_alive()
    may_write.set()
    first.join()
    second.join()
    assert not returned, "the process would end before the result is written"
    assert result_of(tmp_path)["exit_reason"] == FINISHED


def test_energy_is_power_times_time_and_a_save_is_the_median(start, monkeypatch):
    tracker, now = start(), [time.perf_counter()]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    tracker.add_energy(0.0)
    for power_w in (100.0, 300.0):
        now[0] += 1800
        tracker.add_energy(power_w)
    for held_s in (1.0, 9.0, 2.0):
        tracker.record_save(held_s)
    assert tracker.result["energy_wh"] == pytest.approx(200.0)
    assert tracker.result["checkpoint_hold_s"] == 2.0


def test_scalars_read_back_from_the_one_event_file(start, tmp_path, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s)
    tracker = start()
    now_s = 1042.4
    first_epoch(tracker)
    second_epoch(tracker)
    tracker.conclude(FINISHED)
    events = events_of(tmp_path)
    by_report = {name: [value] * 3 for name, value in report_of(0).scalars().items()}
    by_report |= {"train/skipped_steps": [0, 1, 3], "train/loss_spikes": [0, 0, 1]}
    by_epoch = {
        "eval/loss": [1.25, 0.5],
        "eval/accuracy": [0.625, 0.875],
        "train_by_epoch/loss": [1.5, 0.75],
        "train_by_epoch/accuracy": [0.5, 0.75],
        "train_by_epoch/epoch_s": [3.0, 1.0],
        "train_by_epoch/images_per_s": [200.0, 600.0],
        "train_by_epoch/time_s": [3.0, 4.0],
    }
    assert set(events.Tags()["scalars"]) == {*by_report, *by_epoch}
    for steps, expected in (([5, 10, 20], by_report), ([10, 20], by_epoch)):
        for name, values in expected.items():
            found = events.Scalars(name)
            assert [one.step for one in found] == steps, name
            assert [one.value for one in found] == pytest.approx(values), name
            assert all(abs(one.wall_time - time.time()) < 60 for one in found)
    assert (lines_of(tmp_path)[-1]["seconds"], tracker.result["wall_time_s"]) == (42.4, pytest.approx(42.4))


def test_a_run_that_goes_on_keeps_its_counts_and_forgets_what_came_after(start, tmp_path):
    first = start()
    first.describe(settings=SETTINGS, command=["python"], config={})
    first.record(report_of(5, skipped=[(3, SKIPPED)]))
    first.guard.counts["log write"] = 2
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    memory = json.loads(json.dumps({**first.memory(), "wall_time_s": 1000.0}))
    first.record(report_of(6, skipped=[(6, SKIPPED)], spikes=[SPIKE]))

    second = start(memory=memory)
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines
    assert second.result["exit_reason"] is None
    second.describe(settings=SETTINGS, command=["python"], config={})
    second.record(report_of(6))
    second.conclude("finished")
    result = result_of(tmp_path)
    counts = ("resumed", "skipped_steps", "loss_spikes", "log_write_failures")
    assert [result[name] for name in counts] == [1, 1, 0, 2]
    assert result["wall_time_s"] > 1000
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=False).Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [5, 6]


def test_the_speed_is_that_of_this_number_of_ranks(start):
    first = start()
    first_epoch(first)  # 600 images in 3 s
    second = start(result={**KNOWN, "np": 1}, memory=first.memory())
    second_epoch(second)  # 600 images in 1 s
    assert (second.result["train_images_per_s"], second.result["train_time_s"]) == (600.0, 4.0)
    assert start(memory=first.memory()).result["train_images_per_s"] == 200.0
    middle = {**first.memory(), "position": {"visited": 300, "train_s": 0.75}}  # of this epoch, by 2 ranks
    third = start(result={**KNOWN, "np": 1}, memory=middle)
    second_epoch(third)
    assert third.result["train_images_per_s"] == 1200.0


def test_a_rank_that_does_not_write_writes_nothing_but_knows_the_result(start, tmp_path):
    tracker = start(is_writer=False)
    tracker.describe(settings=SETTINGS, command=["python"], config={})
    tracker.write_picture("phases", None)
    tracker.record_event({"event": "restarted"}, {"restarts": 1})
    assert first_epoch(tracker)["eval/accuracy"] == 0.625
    tracker.conclude(FINISHED)
    assert list(tmp_path.iterdir()) == []
    names = ("steps", "skipped_steps", "loss_spikes", "exit_reason")
    assert [tracker.result[name] for name in names] == [10, 1, 0, "finished"]


def test_no_write_that_fails_reaches_the_training(start, tmp_path, monkeypatch, capsys):
    """The disk is full from the second epoch on; only the room that was taken before is left."""
    tracker = start()
    tracker.describe(settings=SETTINGS, command=["python"], config={"old": True})
    first_epoch(tracker)
    lines, names = lines_of(tmp_path), {path.name for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    monkeypatch.setattr("hvdtrain.settings.safety.files.new_file", full)
    second_epoch(tracker)
    tracker.write_document("config.json", {"new": True})
    tracker.write_rank_facts(0, host="one")
    tracker.write_picture("phases", Figure(figsize=(2, 1)))
    tracker.conclude(FINISHED)
    result = result_of(tmp_path)
    assert (result["exit_reason"], result["steps"], result["log_write_failures"] >= 8) == ("finished", 20, True)
    assert lines_of(tmp_path) == lines
    assert [one.step for one in events_of(tmp_path).Scalars("train/loss")] == [5, 10]
    assert json.loads((tmp_path / "config.json").read_text()) == {"old": True}
    assert names ^ {path.name for path in tmp_path.iterdir()} == {"result.json", "result.json.part"}
    [warning] = capsys.readouterr().err.splitlines()
    assert "No space left on device" in warning


def test_a_metric_that_falls_is_best_when_it_is_lowest(start):
    class MaskedTokens(Task):
        unit, best = "masked tokens", "perplexity"

    tracker = start(task=MaskedTokens(), result={})
    seen = []
    for perplexity in (math.nan, 80.0, math.nan, 70.0, 75.0):
        test = {"loss": 1.0, "perplexity": perplexity}
        seen.append(tracker.is_best(test))
        tracker.record_epoch(epoch_of(samples=10, train_s=2.0, test=test))
    assert seen == [False, True, False, True, False]
    names = ("best_perplexity", "eval_perplexity", "train_masked tokens_per_s", "unreadable_masked tokens")
    assert [tracker.result[name] for name in names] == [70.0, 75.0, 5.0, 0]


def test_an_event_is_a_line_and_a_curve(start, tmp_path):
    tracker = start()
    first_epoch(tracker)
    before = lines_of(tmp_path)
    tracker.record_event({"event": "restarted", "step": 10}, {"restarts": 1})
    assert lines_of(tmp_path) == [*before, {"event": "restarted", "step": 10}]
    assert [(one.step, one.value) for one in events_of(tmp_path).Scalars("restarts")] == [(10, 1.0)]
