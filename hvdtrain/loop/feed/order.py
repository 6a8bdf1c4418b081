"""Selects the samples that each rank sees at each step. N samples of a batch, S of a split."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hvdtrain.core.settings import BatchSettings
from hvdtrain.settings.safety.exits import BadInput

_PERMUTATION = 0  # separates this random stream from those of tasks, which begin with 1


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """How an epoch is divided into batches."""

    micro_batch: int  # samples of one forward and backward pass of a rank
    global_batch: int  # maximum samples per optimizer step of all ranks together
    steps_per_epoch: int


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of one global batch."""

    indices: tuple[Tensor, ...]  # (N,) indices into the split each; equally many on every rank, for every batch
    global_size: int  # samples of the global batch
    global_count: float  # weight of these samples
    group_count: float  # weight of the samples of this rank's group, see Comm.sync_group


@dataclass(frozen=True, kw_only=True)
class RankBatches:
    """One rank's parts of an epoch's batches, each made on request: there may be millions of them."""

    places: Sequence[slice]  # positions of the batches in the epoch's order
    at: Callable[[slice], RankBatch]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[RankBatch]:
        return map(self.at, self.places)

    def __getitem__(self, some: slice) -> "RankBatches":
        return replace(self, places=self.places[some])


def batch_sizes(config: BatchSettings, *, samples: int, ranks: int) -> BatchSizes:
    """Return how `ranks` ranks divide an epoch; BadInput if they do not divide the global batch."""
    parts = ranks * config.accumulate_steps
    if config.global_batch_size is None:
        assert config.batch_size_per_rank != "auto"
        micro_batch = config.batch_size_per_rank
    else:
        micro_batch, remainder = divmod(config.global_batch_size, parts)
        if remainder or not micro_batch:
            nearest = max(1, round(config.global_batch_size / parts)) * parts
            raise BadInput(
                f"--global-batch-size {config.global_batch_size}: not divisible by {ranks} ranks x "
                f"--accumulate-steps {config.accumulate_steps}. Pass {nearest}."
            )
    global_batch = micro_batch * parts
    return BatchSizes(
        micro_batch=micro_batch, global_batch=global_batch, steps_per_epoch=len(cut(samples, global_batch))
    )


def permutation(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch visits the samples; it does not depend on the rank or the number of ranks."""
    return torch.from_numpy(np.random.default_rng([seed, epoch, _PERMUTATION]).permutation(samples))


def shard(count: int, rank: int, size: int) -> slice:
    """Return the rank's contiguous part of `count` items; parts differ by at most one item."""
    return slice(count * rank // size, count * (rank + 1) // size)


def distribute(samples: Tensor, cost: Tensor, *, rank: int, size: int) -> Tensor:
    """Return the rank's part of samples (N,): its shard, or if their `cost` (N,) differs, a part of equal cost.

    By cost, samples are distributed in turn, the most expensive first, forwards and backwards; parts differ by at most
    one sample.
    """
    if len(samples) == 0 or bool((cost == cost[0]).all()):
        return samples[shard(len(samples), rank, size)]
    place = torch.arange(len(samples))
    lap, seat = place // size, place % size
    assigned_to = torch.where(lap % 2 == 0, seat, size - 1 - seat)
    return samples[cost.argsort(descending=True, stable=True)][assigned_to == rank]


def cut(samples: int, global_batch: int) -> list[slice]:
    """Return the fewest batches of at most `global_batch` samples; their sizes differ by at most one.

    A smaller last batch could have only two samples, and would change the weights as much as any other.
    """
    batches = math.ceil(samples / global_batch)
    return [shard(samples, place, batches) for place in range(batches)]


def rank_batches(
    order: Tensor,
    *,
    global_batch: int,
    micro_batch: int,
    rank: int,
    size: int,
    sync_group: range | None = None,
    counts: Callable[[Tensor], Tensor],
    cost: Callable[[Tensor], Tensor],
) -> RankBatches:
    """Divide an epoch's order (S,) into global batches, and each into the ranks' parts, of at most two sizes per rank.

    `sync_group` are the ranks that sum their gradients at every step, if not all. A part has as few micro-batches of at
    most `micro_batch` samples as the largest part of any rank and batch needs.
    """
    places = cut(len(order), global_batch)
    passes = math.ceil(math.ceil(math.ceil(len(order) / max(1, len(places))) / size) / micro_batch)

    def at(place: slice) -> RankBatch:
        batch = order[place]
        costs = cost(batch)
        global_count = group_count = counts(batch).sum().item()
        if sync_group is not None:
            group_count = sum(
                counts(distribute(batch, costs, rank=each, size=size)).sum().item() for each in sync_group
            )
        return RankBatch(
            indices=distribute(batch, costs, rank=rank, size=size).tensor_split(passes),
            global_size=len(batch),
            global_count=global_count,
            group_count=group_count,
        )

    return RankBatches(places=places, at=at)
