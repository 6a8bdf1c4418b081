"""Which samples each rank sees at each step. N samples of a batch, S of a split."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvdtrain.safety.exits import BadInput
from hvdtrain.train.options import RunConfig

_PERMUTATION = 0  # keeps this random stream apart from those of tasks, which begin with 1


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """How an epoch is cut."""

    micro_batch: int  # samples that a rank takes through the model at a time
    global_batch: int  # samples per optimizer step of all ranks together
    steps_per_epoch: int


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of one global batch."""

    samples: Tensor  # (N,) indices into the split; N differs by at most one between ranks
    count: float  # what they weigh
    global_size: int  # samples of the global batch
    global_count: float  # what they weigh together


def batch_sizes(config: RunConfig, *, samples: int, ranks: int) -> BatchSizes:
    """How `ranks` ranks cut an epoch of so many samples; BadInput where they do not divide the global batch."""
    parts = ranks * config.accumulate_steps
    micro_batch = config.batch_size_per_rank
    if config.global_batch_size is not None:
        micro_batch, rest = divmod(config.global_batch_size, parts)
        if rest or not micro_batch:
            near = max(1, round(config.global_batch_size / parts)) * parts
            raise BadInput(
                f"--global-batch-size {config.global_batch_size} cannot be divided by {ranks} ranks x "
                f"--accumulate-steps {config.accumulate_steps}: {near} can"
            )
    global_batch = micro_batch * parts
    return BatchSizes(
        micro_batch=micro_batch, global_batch=global_batch, steps_per_epoch=math.ceil(samples / global_batch)
    )


def permutation(samples: int, *, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples; the same on every rank and for every number of ranks."""
    return torch.from_numpy(np.random.default_rng([seed, epoch, _PERMUTATION]).permutation(samples))


def shard(count: int, rank: int, size: int) -> slice:
    """The rank's contiguous part of `count` things; parts differ by at most one."""
    return slice(count * rank // size, count * (rank + 1) // size)


def deal(samples: Tensor, cost: Tensor, *, rank: int, size: int) -> Tensor:
    """The rank's part of samples (N,): its shard, or where their `cost` (N,) differs one that costs as much as others.

    Then they are dealt out in turns, the dearest first, forwards and backwards; parts differ by at most one sample.
    """
    if len(samples) == 0 or bool((cost == cost[0]).all()):
        return samples[shard(len(samples), rank, size)]
    place = torch.arange(len(samples))
    lap, seat = place // size, place % size
    dealt_to = torch.where(lap % 2 == 0, seat, size - 1 - seat)
    return samples[cost.argsort(descending=True, stable=True)][dealt_to == rank]


def rank_batches(
    order: Tensor,
    *,
    global_batch: int,
    rank: int,
    size: int,
    counts: Callable[[Tensor], Tensor],
    cost: Callable[[Tensor], Tensor],
) -> list[RankBatch]:
    """Cut an epoch's order (S,) into global batches, the last maybe smaller, and each into the ranks' parts."""
    batches = []
    for batch in order.split(global_batch) if len(order) else ():
        mine = deal(batch, cost(batch), rank=rank, size=size)
        count, global_count = counts(mine).sum().item(), counts(batch).sum().item()
        batches.append(RankBatch(samples=mine, count=count, global_size=len(batch), global_count=global_count))
    return batches


def micro_batches(batch: RankBatch, *, size: int, at_most: int) -> tuple[Tensor, ...]:
    """The rank's samples in as many parts as every one of the `size` ranks makes, of at most so many samples."""
    return batch.samples.tensor_split(math.ceil(math.ceil(batch.global_size / size) / at_most))
