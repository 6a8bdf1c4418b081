"""Ranks are lost while the loop waits for them: whoever goes on counts each step and each epoch once."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdtrain.checkpoint.saves import Saves
from hvdtrain.core.position import Position
from hvdtrain.feed.feed import Feed
from hvdtrain.loop.loop import position_after
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.save_points import NEVER
from hvdtrain.recipe.schedule import learning_rate
from hvdtrain.safety import faults
from hvdtrain.safety.watchdog import OFF
from hvdtrain.tracking.console import Console
from hvdtrain.tracking.tracker import Tracker
from tests.steps import CPU, loop_of, task_of
from tests.unit.checkpoint.checkpoints import folder_of
from tests.unit.loop.test_loop import (
    LOSS_OF_2,
    TRAIN,
    Watching,
    alone_of,
    limits,
    random_images,
    reports_of,
    sizes_of,
)
from tests.unit.loop.trainings import SMALL, begun, train


class Torn(Watching):
    """Its calls in `torn` fail while the ranks tell each other why they skip the step."""

    def __init__(self, *, torn=(), **options):
        super().__init__(alone_of(0, 1), **options)
        self._torn = torn

    def __call__(self, *arguments, **options):
        taken = super().__call__(*arguments, **options)
        taken.read_alone = lambda: taken.done
        if taken.number - 1 in self._torn:
            taken.read = lost
        return taken


def lost(*_, **__):
    raise ConnectionError


def epoch_of(step, progress, ends):
    images = random_images()
    loop = loop_of(
        step,
        Feed(images.train, task_of(images), step.comm, sizes_of(12, 12), seed=7, device=CPU),
        rate=learning_rate(SMALL, samples=TRAIN, steps_per_epoch=5),
        limits=ends,
        reports=reports_of(step.comm),
        progress=progress,
    )
    return loop.steps(progress.position)


@pytest.mark.parametrize(("torn", "checked"), [((1,), False), ((), True)], ids=["before it is read", "after"])
def test_a_skipped_step_is_left_to_count_once_where_a_rank_is_lost_as_it_is_read(torn, checked):
    ends = limits()
    if checked:
        ends.step_known = lambda number, _: lost() if number == 2 else None
    progress = Progress(Position())
    coming = epoch_of(Torn(skips={1: LOSS_OF_2}, torn=torn), progress, ends)
    with pytest.raises(ConnectionError):
        list(coming)
    left = progress.unreported()
    assert (progress.position.step, left.skipped_steps, left.totals["count"]) == (3, 1, 10 + 10)


def test_an_epoch_is_recorded_once_and_its_best_weights_are_kept_where_a_rank_is_lost_meanwhile(tmp_path):
    training, kept = begun(epochs=2, ema_epochs=0.0), []
    tracker = Tracker(tmp_path, is_writer=True, task=training.step.task, result={})
    run = SimpleNamespace(faults=faults.NONE, console=Console(is_shown=False), tracker=tracker, watch=OFF)

    def save_best(position, *_, **metrics):
        kept.append((position.step, metrics["eval_accuracy"]))
        if len(kept) == 2:
            lost()

    def train_on():
        saves = Saves(training.step, training.parts, folder_of(tmp_path), run, NEVER, keep=1)
        saves.save, saves.save_best, saves.wait = (lambda _: None), save_best, (lambda _: True)
        train(training, progress, saves=saves, run=run)

    progress = Progress(Position())
    with pytest.raises(ConnectionError):
        train_on()
    progress.go_on(progress.stopped())
    train_on()
    tracker.conclude("finished")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "epoch" in line]
    assert [line["epoch"] for line in epochs] == [1, 2]
    assert kept[1:] == [(8, epochs[1]["eval/accuracy"])] * 2
    assert tracker.result["train_time_s"] == pytest.approx(sum(line["train/epoch_s"] for line in epochs))
    assert tracker._count == 2 * len(training.images.train)


def test_a_run_of_so_many_steps_warms_up_and_falls_by_steps_whatever_the_batch():
    """Of 5 steps an epoch, then of 9, as when a rank of three is lost."""
    images, max_steps, lost_after = random_images(), 20, 12
    step, sizes = Watching(alone_of(0, 1)), sizes_of(12, 12)
    feed = Feed(images.train, task_of(images), step.comm, sizes, seed=7, device=CPU)
    by_steps = replace(SMALL, warmup_epochs=1.0, schedule="cosine")
    schedule = {"samples": TRAIN, "max_steps": max_steps}
    lr = learning_rate(by_steps, steps_per_epoch=sizes.steps_per_epoch, **schedule)
    position, shares = Position(), []
    while position.step < max_steps:
        loop = loop_of(step, feed, rate=lr, limits=limits(), reports=reports_of(step.comm, 1), max_steps=max_steps)
        for report in loop.steps(position):
            position = position_after(position, report, train_s=1.0)
            shares.append(report.lr / lr.peak * lr.batch / step.calls[-1]["global_count"])
            if report.step == lost_after:
                sizes = sizes_of(6, 6)
                feed.cut(sizes)
                lr = learning_rate(by_steps, steps_per_epoch=sizes.steps_per_epoch, before=lr, **schedule)
                position = feed.align(position)
                break
        if position.visited == TRAIN:
            position = Position(step=position.step, epoch=position.epoch + 1)
    falling = [0.5 * (1 + math.cos(math.pi * (number - 5) / (max_steps - 5))) for number in range(5, max_steps)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, *falling])
