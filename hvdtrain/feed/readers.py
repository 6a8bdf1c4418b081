"""Samples read by worker processes or the rank. N samples of a batch."""

import ctypes
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hvdtrain.core.phases import Phases
from hvdtrain.core.settings import FileSettings
from hvdtrain.core.task import Batch
from hvdtrain.feed.feed import copied, prefetched
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.cores import count_host_cores
from hvdtrain.safety.exits import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGCHLD_S = 5.0  # by then the kernel has told that a worker is dead


Collate = Callable[[list[Any]], Batch]


class _Plan:
    """What is to be read now, asked for again at each epoch and evaluation by a DataLoader whose workers stay."""

    def __init__(self) -> None:
        self.batches: Sequence[Tensor] = ()
        self.keys: Callable[[Tensor], list[Any]] = Tensor.tolist

    def __iter__(self) -> Iterator[list[Any]]:
        return map(self.keys, self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _die_with_rank(_worker: int) -> None:
    """Ask the kernel to end this worker when its rank ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started now never get what asks a rank to leave, which may still save.

    A terminal, timeout(1) and mpirun send it to all processes of a group. The start of Python's resource tracker
    unblocks SIGINT and SIGTERM, so it comes first; it ignores both itself.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _received(arriving: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; if a worker dies as it hands one over, torch's handler of SIGCHLD tells which one, and of what."""
    try:
        yield from arriving
    except (ConnectionError, EOFError):
        time.sleep(_SIGCHLD_S)  # that handler raises in here
        raise


class Readers:
    """A rank's worker processes, for all splits in turn: whoever reads next ends the reading before.

    Without workers, or where nothing is read ahead, the rank reads by itself, the same samples.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate, *, workers: int, prefetch: int) -> None:
        """Workers get copies of the dataset and of `collate`, which makes a batch of samples; both can be pickled."""
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
                "worker_init_fn": _die_with_rank,
            }
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._plan,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # not the model's: a resumed epoch begins twice
            **processes,
        )

    def read(
        self, batches: Sequence[Tensor], keys: Callable[[Tensor], list[Any]], device: torch.device, phases: Phases
    ) -> Iterator[Batch]:
        """Each of `batches` (N,) on the device; `keys` are what the dataset gives the samples of a batch for."""
        self._plan.batches, self._plan.keys = batches, keys
        if phases.isolated:
            return copied(map(self._read_here, self._plan), device, phases)
        with _deaf() if self.processes else nullcontext():
            arriving = _received(iter(self._loader))  # the first one starts the workers
        if device.type != "cuda":
            return arriving
        if not self._ahead:
            return copied(arriving, device, phases)
        self._stream = self._stream or torch.cuda.Stream(device)
        return prefetched(arriving, device, self._stream, phases)

    def _read_here(self, keys: list[Any]) -> Batch:
        """A batch that no worker has read."""
        return self._collate([self._dataset[key] for key in keys])


def count_workers(settings: FileSettings, comm: Comm) -> int:
    """The processes that read files ahead for this rank."""
    if not settings.prefetch:
        return 0
    if settings.workers is not None:
        return settings.workers
    return max(1, count_host_cores(comm.local_size) // comm.local_size)
