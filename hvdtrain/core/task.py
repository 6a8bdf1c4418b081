"""The interface of a task, which is all that the loop knows about images, text or other data.

N samples of a batch on this rank.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.model import batch_norm
from hvdtrain.core.phases import Phase
from hvdtrain.settings.safety.errors import BadInput

Batch = dict[str, Any]  # samples first: tensors (N, ...), lists of N texts, bytes or dicts; unnamed: inputs and targets
Totals = dict[str, float]  # sums by name over the samples of all ranks: loss, count and those of Sums.more
Model = Callable[..., Any]  # the run's model

UNREADABLE = "unreadable"  # name of the sum that counts unreadable samples, which have weight 0


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over one batch on this rank; scalars on the device.

    >>> Squares().loss(torch.nn.Identity(), {"inputs": samples}, training=True)  # the example of Task
    Sums(loss=tensor(140.), count=tensor(8.), more={})
    """

    loss: Tensor  # differentiable in training
    count: Tensor  # what the loss is summed over
    more: Mapping[str, Tensor] = field(default_factory=dict)  # further sums for metrics, and UNREADABLE


def total(parts: Sequence[Sums]) -> tuple[list[str], Tensor]:
    """Add the parts; return the names of the sums, 'loss' and 'count' first, and a float64 vector of their totals."""
    scalars = [(part.loss.detach(), part.count, *part.more.values()) for part in parts]
    vectors = [torch.stack([scalar.double() for scalar in of_part]) for of_part in scalars]
    return ["loss", "count", *parts[0].more], torch.stack(vectors).sum(0)


class Task:
    """One task on one training split; the same on all ranks. A task implements `loss`; the rest has defaults.

    >>> class Squares(hvdtrain.Task):
    ...     def loss(self, model, batch, *, training):
    ...         losses = model(batch["inputs"]).square().mean(1)  # (N,)
    ...         return hvdtrain.Sums(loss=losses.sum(), count=torch.ones_like(losses).sum())
    >>> Squares().metrics({"loss": 6.0, "count": 4.0})
    {'loss': 1.5}
    """

    unit = "samples"  # name of a sample in speeds and messages
    best = "loss"  # the metric that selects the best weights
    higher_is_better = False
    means: Sequence[str] = ()  # names in Sums.more that are shown as metrics, divided by the count
    names: Sequence[str] = ()  # of the other metrics, which are NaN in a test in which no sample counts
    memory_format = torch.contiguous_format  # of the model's weights
    max_unreadable: int | None = None  # limit over all ranks and epochs; the run ends when it is exceeded
    remedies: Mapping[Phase, str] = {}  # replaces the advice for input phases that are the bottleneck

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        """Return the sums over the batch; N may be 0."""
        raise NotImplementedError

    def counts(self, samples: Tensor) -> Tensor:
        """Return the weight of each of these training samples (N,), computed from its index without communication."""
        return torch.ones(len(samples))

    def cost(self, samples: Tensor) -> Tensor:
        """Return the compute time of each of these samples (N,), in any unit, for balancing samples over the ranks."""
        return torch.ones(len(samples))

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        """Turn what was read into the model's input, on the device of both; noise is keyed by seed, epoch and sample.

        For evaluation `epoch` is None, and no noise is added.
        """
        return raw

    def averaged_buffers(self, model: nn.Module) -> Collection[str]:
        """Return the names of the buffers that are averaged over ranks to evaluate and to resume; the rest is rank 0's.

        A skipped step takes back what it has changed in them. By default these are the running means and variances of
        batch and instance normalisation.
        """
        return batch_norm.running_statistics(model)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the model's arguments, samples first; by default the first tensor of the batch."""
        return (next(value for value in batch.values() if isinstance(value, Tensor)),)

    def metrics(self, totals: Totals) -> dict[str, float]:
        """Return the metrics by name, always the same ones and including 'loss'.

        `totals` is a dict[str, float]: the sums by name over samples of all ranks, 'loss', 'count' and those of
        Sums.more. It is called for sums of real samples only, with a count that is not 0.
        """
        count = totals.get("count", 0.0)
        if count and (missing := [name for name in self.means if name not in totals]):
            raise BadInput(
                f"{type(self).__name__}: Sums.more lacks {missing[0]!r} in training or in tests. Return the same sums "
                "from every call of `loss`."
            )
        return {name: totals[name] / count if count else math.nan for name in ("loss", *self.means)}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the metrics of a test for the user."""
        return ", ".join(f"{name} {metrics[name]:.4g}" for name in dict.fromkeys((self.best, *metrics)))


def metrics_of(task: Task, totals: Totals) -> dict[str, float]:
    """Return the task's metrics of these totals; NaN, without a call of the task, if nothing was counted."""
    if totals.get("count"):
        return task.metrics(totals)
    return dict.fromkeys(("loss", *task.means, task.best, *task.names), math.nan)


def added(totals: Totals, more: Totals) -> Totals:
    """Add two sets of totals."""
    return {name: totals.get(name, 0.0) + more.get(name, 0.0) for name in totals | more}
