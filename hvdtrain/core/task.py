"""What the loop must know of a task: images now, text or anything else as well.

N samples of a batch on this rank.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.phases import Phase

Batch = dict[str, Tensor]  # samples first: every tensor is (N, ...)
Totals = dict[str, float]  # sums by name over the samples of all ranks; 'loss' and 'count' are always among them
Model = Callable[..., Any]

UNREADABLE = "unreadable"  # the sum that counts samples which could not be read, and which weigh nothing


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Over what counts on this rank in one batch; scalars on the device."""

    loss: Tensor  # with a gradient in training
    count: Tensor  # what the loss is summed over
    more: Mapping[str, Tensor] = field(default_factory=dict)  # what else the metrics are made of, and UNREADABLE


def total(parts: Sequence[Sums]) -> tuple[list[str], Tensor]:
    """The names of the sums, 'loss' and 'count' first, and their totals over the parts: a float64 vector."""
    scalars = [(part.loss.detach(), part.count, *part.more.values()) for part in parts]
    vectors = [torch.stack([scalar.double() for scalar in of_part]) for of_part in scalars]
    return ["loss", "count", *parts[0].more], torch.stack(vectors).sum(0)


class Task:
    """One task on one training split; the same on all ranks. A task writes `loss`, the rest has defaults."""

    unit = "samples"  # what a sample is called in speeds and complaints
    best = "loss"  # the metric by which the best weights are known
    higher_is_better = False
    means: Sequence[str] = ()  # of Sums.more, what is shown as a metric: divided by the count
    memory_format = torch.contiguous_format  # of the model's weights
    targets: Collection[str] | None = None  # what of a batch the loss uses beside the model's outputs; None: maybe all
    max_unreadable: int | None = None  # samples of all ranks and epochs; a run with more ends
    remedies: Mapping[Phase, str] = {}  # what helps if reading, preparing or copying samples limits a run

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        """Sums over the batch, of which N may be 0."""
        raise NotImplementedError

    def counts(self, samples: Tensor) -> Tensor:
        """The weight of each of these training samples (N,), known from its index alone: no communication."""
        return torch.ones(len(samples))

    def cost(self, samples: Tensor) -> Tensor:
        """The computing time of each of them (N,), in any unit: samples of unequal cost are dealt out to the ranks."""
        return torch.ones(len(samples))

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        """The model's input from what was read, on the device of both; noise is keyed by seed, epoch and sample.

        Without an epoch, for evaluation, there is none.
        """
        return raw

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The arguments of the model, samples first: here the first tensor of the batch."""
        return (next(iter(batch.values())),)

    def metrics(self, totals: Totals) -> dict[str, float]:
        """The metrics by name, 'loss' among them, always the same ones; NaN where nothing was counted."""
        count = totals.get("count", 0.0)
        return {name: totals[name] / count if count else math.nan for name in ("loss", *self.means)}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """The metrics of a test for people."""
        return ", ".join(f"{name} {metrics[name]:.4g}" for name in dict.fromkeys((self.best, *metrics)))


def added(totals: Totals, more: Totals) -> Totals:
    """The sums of both."""
    return {name: totals.get(name, 0.0) + more.get(name, 0.0) for name in totals | more}
