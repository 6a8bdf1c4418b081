"""From the samples of a split to batches on the device. N samples of a batch, S of a split."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hvdtrain.ranks.comm import Group
from hvdtrain.timing.phases import OFF, Phases
from hvdtrain.train.order import BatchSizes, RankBatch, micro_batches, permutation, rank_batches
from hvdtrain.train.task import Batch, Task


class Split(Protocol):
    """One split of a data set."""

    def __len__(self) -> int: ...

    def batches(self, indices: Sequence[Tensor], device: torch.device, phases: Phases = OFF) -> Iterator[Batch]:
        """For each (N,) index tensor the samples as they were stored, on the device."""


class Resident:
    """A split that lives on the device."""

    def __init__(self, **tensors: Tensor) -> None:
        """By name, each (S, ...)."""
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batches(self, indices: Sequence[Tensor], device: torch.device, phases: Phases = OFF) -> Iterator[Batch]:
        if any(tensor.device != device for tensor in self.tensors.values()):
            self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        for samples in indices:
            phases.enter("to_device")
            chosen = samples.to(device)
            phases.enter("read")
            yield {name: tensor[chosen] for name, tensor in self.tensors.items()}


def prefetched(batches: Iterable[Batch], device: torch.device, phases: Phases = OFF) -> Iterator[Batch]:
    """Copy each batch to the GPU on a stream of its own while the one before is being used."""
    stream = torch.cuda.Stream(device)
    ready: Batch | None = None
    for batch in batches:
        phases.enter("to_device")
        with torch.cuda.stream(stream):
            arriving = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if ready is not None:
            yield ready
            phases.enter("to_device")
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in arriving.values():
            tensor.record_stream(torch.cuda.current_stream(device))
        ready = arriving
        phases.enter("read")
    if ready is not None:
        yield ready


class Feed:
    """The training split as one rank's steps want it: micro-batches, prepared, in the order of the epoch."""

    def __init__(
        self,
        split: Split,
        task: Task,
        group: Group,
        sizes: BatchSizes,
        *,
        seed: int,
        device: torch.device,
        phases: Phases = OFF,
    ) -> None:
        """`group` are the ranks among whom the samples are divided."""
        self.split = split
        self.sizes = sizes
        self._task = task
        self._group = group
        self._seed = seed
        self._device = device
        self._phases = phases

    def batches(self, epoch: int, *, visited: int) -> list[RankBatch]:
        """This rank's part of each step that is left of an epoch, of which `visited` samples were seen."""
        return rank_batches(
            permutation(len(self.split), seed=self._seed, epoch=epoch)[visited:],
            global_batch=self.sizes.global_batch,
            rank=self._group.rank,
            size=self._group.size,
            counts=self._task.counts,
            cost=self._task.cost,
        )

    def inputs(self, batches: Sequence[RankBatch], epoch: int) -> Iterator[tuple[int, Iterator[Batch]]]:
        """For each batch how many micro-batches it has, and these themselves, read one by one as they are asked for."""
        size, at_most = self._group.size, self.sizes.micro_batch
        parts = [micro_batches(batch, size=size, at_most=at_most) for batch in batches]
        raw = self.split.batches([samples for of_batch in parts for samples in of_batch], self._device, self._phases)
        for of_batch in parts:
            yield len(of_batch), self._prepared(of_batch, raw, epoch)

    def _prepared(self, parts: Iterable[Tensor], raw: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        for samples in parts:
            self._phases.enter("read")
            batch = next(raw)
            self._phases.enter("augment")
            yield self._task.prepare(batch, samples, epoch)
