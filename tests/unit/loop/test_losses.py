"""Ranks are lost while the loop waits for them: whoever goes on counts each step and each epoch once."""

import math
from dataclasses import replace

import pytest

from hvdtrain.core.position import Position
from hvdtrain.loop.feed.feed import Feed
from hvdtrain.loop.loop import position_after
from hvdtrain.loop.progress import Progress
from hvdtrain.recipe.schedule import learning_rate
from tests.steps import CPU, loop_of, task_of
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
from tests.unit.loop.trainings import SMALL


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
