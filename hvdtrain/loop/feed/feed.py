"""The path from the samples of a split to batches on the device. N samples of a batch, S of a split."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.position import Position
from hvdtrain.core.task import Batch, Task
from hvdtrain.loop.feed.order import BatchSizes, RankBatch, RankBatches, cut, permutation, rank_batches
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.watchdog import OFF as UNWATCHED
from hvdtrain.settings.safety.watchdog import Watchdog

AT_ONCE = 10_000  # batches whose samples are divided in advance: a second or two, and a few MB


class Split(Protocol):
    """One split of a data set.

    >>> class Evens:
    ...     reads_files, readers, content = False, 0, None
    ...     def __len__(self):
    ...         return 1000
    ...     def batches(self, indices, device, epoch, phases=None):
    ...         for samples in indices:
    ...             yield {"inputs": 2.0 * samples}
    >>> next(Evens().batches([torch.tensor([3, 7])], run.device, epoch=0))
    {'inputs': tensor([ 6., 14.])}
    """

    reads_files: bool  # during training, so that a slow disk may delay it
    readers: int  # number of processes that prefetch for this rank
    content: str | None  # the SHA-256 of the whole data set, if known: a run resumes with the same data only

    def __len__(self) -> int: ...

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        """Yield for each (N,) index tensor the stored samples, on the device.

        The index tensors are on the device, or on the host if files are read by them. If `phases.isolated`, this rank
        reads each batch itself when it is requested.

        Random choices during reading are keyed by seed, epoch and sample; without an epoch nothing is random.
        """


class Resident:
    """A split in the device's memory.

    >>> next(hvdtrain.Resident(inputs=samples).batches([torch.tensor([3])], run.device, epoch=0))
    {'inputs': tensor([[3.]])}
    """

    reads_files, readers = False, 0
    content: str | None = None

    def __init__(self, **tensors: Tensor) -> None:
        """Store tensors by name, each (S, ...)."""
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        if any(tensor.device != device for tensor in self.tensors.values()):
            self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        for samples in indices:
            # On a CPU, four times as fast as tensor[samples].
            yield {name: tensor.index_select(0, samples) for name, tensor in self.tensors.items()}


def moved(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return the batch with its tensors on the device, also those in dicts."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    # tree_map takes longer than a copy.
    return {
        name: move(value) if isinstance(value, Tensor) else tree_map_only(Tensor, move, value)
        for name, value in batch.items()
    }


def copied(batches: Iterable[Batch], device: torch.device, phases: Phases = OFF) -> Iterator[Batch]:
    """Copy each batch to the device when it is requested, without any overlap."""
    for batch in batches:
        phases.enter("to_device")
        yield moved(batch, device)


def prefetched(
    batches: Iterable[Batch], device: torch.device, stream: torch.cuda.Stream, phases: Phases = OFF
) -> Iterator[Batch]:
    """Copy each batch to the GPU on `stream` while the previous one is in use.

    The allocator keeps memory per stream, so the caller always uses the same one.
    """
    ready: Batch | None = None
    for batch in batches:
        phases.enter("to_device")
        with torch.cuda.stream(stream):
            copying = moved(batch, device, non_blocking=True)
        if ready is not None:
            yield ready
            phases.enter("to_device")
        torch.cuda.current_stream(device).wait_stream(stream)
        for value in tree_iter(copying):
            if isinstance(value, Tensor):
                value.record_stream(torch.cuda.current_stream(device))
        ready = copying
        phases.enter("read")
    if ready is not None:
        yield ready


def raw_batches(
    split: Split,
    indices: Sequence[Tensor],
    device: torch.device,
    epoch: int | None,
    *,
    phases: Phases = OFF,
    watchdog: Watchdog = UNWATCHED,
) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the split's batches, each with its indices (N,) on the device; report reading to the watchdog.

    All indices are copied at once: copying those of each step would make the host wait for the device each time.
    """
    if not indices:
        return iter(())
    device_indices = torch.cat(list(indices)).to(device).split([len(samples) for samples in indices])
    if not split.reads_files:
        return zip(device_indices, split.batches(device_indices, device, epoch, phases), strict=True)
    return zip(device_indices, watchdog.time_reads(split.batches(indices, device, epoch, phases)), strict=True)


class Feed:
    """The training split as micro-batches for one rank's steps: prepared, in the order of the epoch."""

    def __init__(
        self,
        split: Split,
        task: Task,
        comm: Comm,
        sizes: BatchSizes,
        *,
        seed: int,
        device: torch.device,
        phases: Phases = OFF,
    ) -> None:
        """Divide the samples among `comm.data`."""
        self.split = split
        self._task = task
        self.sizes = sizes
        self._seed = seed
        self._device = device
        self._phases = phases
        self._rank, self._ranks = comm.data.rank, comm.data.size
        replicas = comm.sync_group.size // comm.replica.size  # replicas that sum their gradients at every step
        first = self._rank - self._rank % replicas
        self._sync_group = range(first, first + replicas) if replicas < self._ranks else None

    def align(self, position: Position) -> Position:
        """Return the position to continue from; if these batches differ, divide the rest of the epoch again."""
        ends = {position.cut_from, *(position.cut_from + batch.stop for batch in self._cut(position.cut_from))}
        return position if position.visited in ends else replace(position, cut_from=position.visited)

    def epochs(self, position: Position, max_steps: int) -> int:
        """Return the number of epochs of a run of `max_steps` steps, including those already done."""
        epoch_steps = len(self.batches(position)) if position.visited else 0  # of the current epoch
        later_steps = max(0, max_steps - position.step - epoch_steps)
        return position.epoch + bool(position.visited) + math.ceil(later_steps / self.sizes.steps_per_epoch)

    def batches(self, position: Position) -> RankBatches:
        """Return this rank's part of each remaining step of the epoch."""
        order = permutation(len(self.split), seed=self._seed, epoch=position.epoch)
        done = [batch.stop <= position.visited - position.cut_from for batch in self._cut(position.cut_from)]
        return rank_batches(
            order[position.cut_from :],
            global_batch=self.sizes.global_batch,
            micro_batch=self.sizes.micro_batch,
            rank=self._rank,
            size=self._ranks,
            sync_group=self._sync_group,
            counts=self._task.counts,
            cost=self._task.cost,
        )[sum(done) :]

    def _cut(self, cut_from: int) -> list[slice]:
        return cut(len(self.split) - cut_from, self.sizes.global_batch)

    def micro_batches(
        self, batches: RankBatches, epoch: int, watchdog: Watchdog = UNWATCHED
    ) -> Iterator[tuple[RankBatch, Iterator[Batch]]]:
        """Yield each batch with its micro-batches, which are read one by one as they are requested."""
        done = 0
        while done < len(batches):  # prefetching stops where the measuring mode changes
            uniform = list(batches[done : done + min(self._phases.uniform_steps, AT_ONCE)])
            indices = [samples for batch in uniform for samples in batch.indices]
            raw = raw_batches(self.split, indices, self._device, epoch, phases=self._phases, watchdog=watchdog)
            for batch in uniform:
                yield batch, self._prepared(len(batch.indices), raw, epoch)
            done += len(uniform)

    def _prepared(self, count: int, raw: Iterator[tuple[Tensor, Batch]], epoch: int) -> Iterator[Batch]:
        for _ in range(count):
            self._phases.enter("read")
            samples, batch = next(raw)
            self._phases.enter("augment")
            yield self._task.prepare(batch, samples, epoch)
