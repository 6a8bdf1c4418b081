"""Reads samples in worker processes, or in the rank itself. N samples of a batch."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hvdtrain.core.phases import Phases
from hvdtrain.core.settings import FileSettings
from hvdtrain.core.task import Batch
from hvdtrain.loop.feed.feed import copied, prefetched
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.cores import count_host_cores
from hvdtrain.settings.safety.reader_processes import starting

_SIGCHLD_S = 5.0  # within this time the kernel reports the death of a worker


Collate = Callable[[list[Any]], Batch]


class _Plan:
    """The items to read next, requested for each epoch and evaluation by a DataLoader with persistent workers."""

    def __init__(self) -> None:
        self.batches: Sequence[Tensor] = ()
        self.keys: Callable[[Tensor], Any] = Tensor.tolist

    def __iter__(self) -> Iterator[Any]:
        return map(self.keys, self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _received(received: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches; if a worker dies, wait for torch's SIGCHLD handler to report which one, and why."""
    try:
        yield from received
    except (ConnectionError, EOFError):
        time.sleep(_SIGCHLD_S)  # that handler raises during the sleep
        raise


class Readers:
    """A rank's worker processes, shared by all splits: a new reader ends the previous reading.

    Without workers or prefetching, the rank itself reads the same samples.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate, *, workers: int, prefetch: int) -> None:
        """Create the readers; workers get pickled copies of the dataset and of `collate`, which makes batches."""
        self._plan, self._dataset, self._collate = _Plan(), dataset, collate
        self._ahead = prefetch > 0
        self.processes = workers if self._ahead else 0
        self._stream: torch.cuda.Stream | None = None  # of the copies to the device
        processes: dict[str, Any] = {}
        if self.processes:
            processes = {
                "num_workers": workers,
                "prefetch_factor": prefetch,
                "persistent_workers": True,
                # A process that has started MPI or CUDA must not be forked; a fork server would outlive its rank.
                "multiprocessing_context": "spawn",
            }
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._plan,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # separate from the model's: a resumed epoch begins twice
            **processes,
        )

    def read(
        self, batches: Sequence[Tensor], keys: Callable[[Tensor], Any], device: torch.device, phases: Phases
    ) -> Iterator[Batch]:
        """Yield each of `batches` (N,) on the device; `keys` returns what the dataset reads a batch by."""
        self._plan.batches, self._plan.keys = batches, keys
        if phases.isolated:
            return copied(map(self._read_here, self._plan), device, phases)
        if not self.processes and device.type != "cuda":
            return map(self._read_here, self._plan)  # with less overhead than a DataLoader
        with starting() if self.processes else nullcontext():
            received = _received(iter(self._loader))  # the first use starts the workers
        if device.type != "cuda":
            return received
        if not self._ahead:
            return copied(received, device, phases)
        self._stream = self._stream or torch.cuda.Stream(device)
        return prefetched(received, device, self._stream, phases)

    def _read_here(self, keys: Any) -> Batch:
        """Read a batch in the rank itself, as torch's DataLoader does."""
        read = getattr(self._dataset, "__getitems__", None)
        return self._collate([self._dataset[key] for key in keys] if read is None else read(keys))


def count_workers(settings: FileSettings, comm: Comm) -> int:
    """Return the number of processes that prefetch files for this rank."""
    if not settings.prefetch:
        return 0
    if settings.workers is not None:
        return settings.workers
    return max(1, count_host_cores(comm.local_size) // comm.local_size)
