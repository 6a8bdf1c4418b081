"""Which samples each rank sees at each step. N samples of a batch, S of a split."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hvdtrain.core.settings import BatchSettings
from hvdtrain.safety.exits import BadInput

_PERMUTATION = 0  # keeps this random stream apart from those of tasks, which begin with 1


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """How an epoch is cut."""

    micro_batch: int  # samples that a rank takes through the model at a time
    global_batch: int  # most samples per optimizer step of all ranks together
    steps_per_epoch: int


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of one global batch."""

    micro_batches: tuple[Tensor, ...]  # (N,) indices into the split each: as many on every rank and for every batch
    global_size: int  # samples of the global batch
    global_count: float  # what they weigh
    group_count: float  # what those weigh that the ranks of this one's group have, see Comm.sync_group


@dataclass(frozen=True, kw_only=True)
class RankBatches:
    """One rank's parts of an epoch's batches, each made when it is asked for: there may be millions of them."""

    places: Sequence[slice]  # of the batches in the epoch's order
    at: Callable[[slice], RankBatch]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[RankBatch]:
        return map(self.at, self.places)

    def __getitem__(self, some: slice) -> "RankBatches":
        return replace(self, places=self.places[some])


def batch_sizes(config: BatchSettings, *, samples: int, ranks: int) -> BatchSizes:
    """How `ranks` ranks cut an epoch of so many samples; BadInput where they do not divide the global batch."""
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


def cut(samples: int, global_batch: int) -> list[slice]:
    """As few batches of at most `global_batch` samples as there can be; their sizes differ by at most one.

    A last batch of what is left over could be of two samples, and would move the weights as far as any other.
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
    """Cut an epoch's order (S,) into global batches, and each into the ranks' parts, of at most two sizes per rank.

    `sync_group` are the ranks that sum their gradients at every step, if these are not all. A part is taken in as few
    micro-batches of at most `micro_batch` samples as that of any rank and batch needs.
    """
    places = cut(len(order), global_batch)
    passes = math.ceil(math.ceil(math.ceil(len(order) / max(1, len(places))) / size) / micro_batch)

    def at(place: slice) -> RankBatch:
        batch = order[place]
        costs = cost(batch)
        global_count = group_count = counts(batch).sum().item()
        if sync_group is not None:
            group_count = sum(counts(deal(batch, costs, rank=each, size=size)).sum().item() for each in sync_group)
        return RankBatch(
            micro_batches=deal(batch, costs, rank=rank, size=size).tensor_split(passes),
            global_size=len(batch),
            global_count=global_count,
            group_count=group_count,
        )

    return RankBatches(places=places, at=at)
