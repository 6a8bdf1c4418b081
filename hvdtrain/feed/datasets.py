"""Data of a program as splits. N samples of a batch, S of a split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.settings import FileSettings
from hvdtrain.core.task import Batch
from hvdtrain.feed.draws import KeyedDraws
from hvdtrain.feed.feed import Resident, Split
from hvdtrain.feed.forms import SampleError, as_tensor, collate, columns
from hvdtrain.feed.loaders import dataset_of
from hvdtrain.feed.readers import Readers, count_workers
from hvdtrain.feed.sending import Sending
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput, print_message

Data = Any  # a Split, one of the forms in feed.forms, a map-style Dataset, or a DataLoader of one


def as_split(data: Data, settings: FileSettings, comm: Comm, *, seed: int) -> Split:
    """Convert the samples to a split; BadInput for data that cannot be indexed."""
    if isinstance(data, DataLoader):
        data = dataset_of(data, prints=comm.rank == 0)
    if hasattr(data, "batches"):
        return cast("Split", data)
    try:
        found = columns(data)
        if found is not None:
            return Resident(**_equally_long({name: as_tensor(name, values) for name, values in found.items()}))
        if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise BadInput(
                f"{type(data).__name__}: its samples have no numbers. Use tensors, or a Dataset with __getitem__ and "
                "__len__: ranks take their parts of it, and a resumed run the rest."
            )
        return _loaded(data, settings, comm, seed)
    except SampleError as error:
        raise BadInput(str(error)) from error


def _equally_long(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) != 1:
        of_tensors = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BadInput(
            f"tensors of a split: must have equally many samples ({of_tensors or 'there are none'}). Correct their "
            "lengths."
        )
    return tensors


def _loaded(dataset: Dataset[Any], settings: FileSettings, comm: Comm, seed: int) -> Loaded:
    """Return the split of a Dataset; SampleError if its samples cannot be a batch."""
    workers = _readers_of(dataset, settings, comm)
    loaded = Loaded(dataset, seed=seed, workers=workers, prefetch=settings.prefetch)
    loaded.read_here({0, 1, len(loaded) - 1} & set(range(len(loaded))))
    return loaded


def _readers_of(dataset: Dataset[Any], settings: FileSettings, comm: Comm) -> int:
    """Return the number of processes that read a Dataset for this rank; none if they cannot receive it."""
    kind, workers, sending = type(dataset).__name__, count_workers(settings, comm), Sending(dataset)
    if sending.generators and comm.rank == 0:
        print_message(
            "note",
            f"the {kind} has its own {', '.join(sorted(sending.generators))}. Each reader has a copy, so draws from it "
            "depend on the number of ranks and readers. Draw from torch, numpy.random or random instead: hvdtrain "
            "seeds them for each sample.",
        )
    if workers and sending.problem is not None and comm.rank == 0:
        print_message(
            "note",
            f"reader processes cannot receive the {kind} ({sending.problem}), so the rank itself reads it, without "
            "prefetching. Define its functions and classes at the top level of a file.",
        )
    return workers if sending.problem is None else 0


class Loaded:
    """A split with samples from a Dataset, read one by one."""

    reads_files = True
    content: str | None = None

    def __init__(self, dataset: Dataset[Any], *, seed: int, workers: int, prefetch: int) -> None:
        self._dataset, self._keyed = dataset, KeyedDraws(dataset, seed)
        self._pool = Readers(self._keyed, collate, workers=workers, prefetch=prefetch)
        self.readers = self._pool.processes
        self._empty: Batch | None = None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        for batch in self._pool.read(indices, lambda samples: (epoch, samples.tolist()), device, phases):
            yield batch or self._no_samples(device)

    def read_here(self, samples: Iterable[int]) -> Batch:
        """Read some samples in the rank itself, as for an evaluation."""
        return collate(self._keyed.__getitems__((None, list(samples))))

    def _no_samples(self, device: torch.device) -> Batch:
        """Return an empty batch, for a rank without samples in a small last batch."""
        if self._empty is None:
            self._empty = {name: tensor[:0].to(device) for name, tensor in self.read_here([0]).items()}
        return self._empty
