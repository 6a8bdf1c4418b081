"""One evaluation shared by all ranks."""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hvdtrain.core.model.equal import equal_models
from hvdtrain.core.random_state import all_states, restore_all
from hvdtrain.core.step import Step
from hvdtrain.core.task import Batch, Sums, Totals, metrics_of, total
from hvdtrain.loop.feed.feed import Split, raw_batches
from hvdtrain.loop.save_points import NEVER, SavePoints
from hvdtrain.settings.safety.watchdog import OFF, Watchdog

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
    sets: Mapping[str, range] | None = None,
    save_points: SavePoints = NEVER,
    watchdog: Watchdog = OFF,
    bar: ProgressBar = no_bar,
) -> dict[str, float] | None:
    """Return the task's metrics on a split after step `number`; None if the ranks received a stop request.

    Each sample is evaluated on exactly one rank, and all ranks evaluate the same model. `sets` are parts of the
    split by name; metrics of the first keep their names, those of the others get SET/ before them.
    """
    task, group = step.task, step.slots.comm.data
    model, averaged = equal_models(group, step.model, lambda: step.evaluated, task.averaged_buffers(step.model))
    generators = all_states()
    step.modes.keep()
    model.eval()
    places: list[tuple[str, Tensor, bool]] = []  # set, samples, and whether all ranks have such a batch
    for name, samples in (sets or {"": range(len(split))}).items():
        # One empty part if this rank has no samples.
        parts = torch.arange(samples.start, samples.stop)[group.rank :: group.size].split(micro_batch)
        batches_of_all = math.ceil(len(samples) // group.size / micro_batch)  # a rank may have one more
        places += [(name, part, place < batches_of_all) for place, part in enumerate(parts)]
    sums = {name: list[Sums]() for name, _, _ in places}
    batches = iter(raw_batches(split, [part for _, part, _ in places], step.device, None, watchdog=watchdog))

    def read() -> Batch:
        samples, raw = next(batches)
        return task.prepare(raw, samples, None)

    for name, _, is_of_all in bar(places, title="test", total=len(places)):
        watchdog.begin_evaluation(number)
        if is_of_all and save_points.decide(number)().leave:
            for buffer, own_values in averaged:
                buffer.copy_(own_values)
            restore_all(generators)  # the resumed evaluation draws again
            return None
        sums[name] += step.slots.where.evaluate(step, model, read)
    totals: dict[str, Totals] = {name: {} for name in sums}
    for name, of_set in sums.items():
        if of_set:  # else another rank of the replica computes them
            names, values = total(of_set)
            totals[name] = dict(zip(names, group.allreduce(values).tolist(), strict=True))
    first, *_ = sums
    return {
        metric if name == first else f"{name}/{metric}": value
        for name, of_all in step.slots.comm.replica.allgather(totals)[-1].items()
        for metric, value in metrics_of(task, of_all).items()
    }
