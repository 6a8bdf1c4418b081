"""One evaluation shared by all ranks."""

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch

from hvdtrain.core.step import Step
from hvdtrain.core.task import Batch, Totals, metrics_of, total
from hvdtrain.feed.feed import Split, arriving
from hvdtrain.loop.save_points import NEVER, SavePoints
from hvdtrain.model.equal import equal_models
from hvdtrain.safety.watchdog import OFF, Watchdog

Item = TypeVar("Item")


class ProgressBar(Protocol):
    """Yields items and shows how many were taken."""

    def __call__(self, batches: Iterable[Item], *, title: str, total: int) -> Iterable[Item]:
        """Yield the batches."""


def no_bar(batches: Iterable[Item], *, title: str, total: int) -> Iterable[Item]:  # noqa: ARG001 (see ProgressBar)
    """Yield the batches without showing anything."""
    return batches


@torch.no_grad()
def evaluate(
    step: Step,
    split: Split,
    number: int,
    *,
    micro_batch: int,
    save_points: SavePoints = NEVER,
    watchdog: Watchdog = OFF,
    bar: ProgressBar = no_bar,
) -> dict[str, float] | None:
    """Return the task's metrics on a split after step `number`; None if the ranks received a stop request.

    Each sample is evaluated on exactly one rank, and all ranks evaluate the same model.
    """
    task, group = step.task, step.slots.comm.data
    model, averaged = equal_models(group, step.model, lambda: step.evaluated, task.averaged_buffers(step.model))
    step.modes.keep()
    model.eval()
    samples_of_rank = torch.arange(len(split))[group.rank :: group.size]
    parts = samples_of_rank.split(micro_batch)  # one empty part if this rank has no samples
    batches_of_all = math.ceil(len(split) // group.size / micro_batch)  # a rank may have one more
    sums = []
    batches = iter(arriving(split, parts, step.device, None, watchdog=watchdog))

    def read() -> Batch:
        samples, raw = next(batches)
        return task.prepare(raw, samples, None)

    for place in bar(range(len(parts)), title="test", total=len(parts)):
        watchdog.begin_evaluation(number)
        if place < batches_of_all and save_points.decide(number)().leave:
            for buffer, own_values in averaged:
                buffer.copy_(own_values)
            return None
        sums += step.slots.where.evaluate(step, model, read)
    totals: Totals = {}
    if sums:
        names, values = total(sums)
        totals = dict(zip(names, group.allreduce(values).tolist(), strict=True))
    return metrics_of(task, step.slots.comm.replica.allgather(totals)[-1])
