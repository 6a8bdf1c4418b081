"""Data of a program as splits. N samples of a batch, S of a split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.settings import FileSettings
from hvdtrain.core.task import Batch
from hvdtrain.loop.feed.draws import KeyedDraws
from hvdtrain.loop.feed.feed import Resident, Split, moved
from hvdtrain.loop.feed.forms import SampleError, are_several, as_tensor, collate, columns
from hvdtrain.loop.feed.loaders import dataset_of
from hvdtrain.loop.feed.readers import Readers, count_workers
from hvdtrain.loop.feed.sending import Sending
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput, print_message

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
        if not _is_indexed(data):
            lacks = "__len__" if _has_numbers(data) else "__getitem__"
            raise BadInput(
                f"{type(data).__name__}: has no {lacks}. Use tensors, or a Dataset with __getitem__ and __len__: ranks "
                "divide the samples by their numbers, and a resumed run reads the rest of an epoch."
            )
        return _loaded(data, settings, comm, seed)
    except SampleError as error:
        raise BadInput(str(error)) from error


def as_test_split(data: Data, settings: FileSettings, comm: Comm, *, seed: int) -> tuple[Split, dict[str, range]]:
    """Convert the test samples, or several sets of them by name, to one split; return also the samples of each set.

    The name of a single set is empty.
    """
    if not are_several(data):
        split = as_split(data, settings, comm, seed=seed)
        return split, {"": range(len(split))}
    parts: dict[str, Any] = {
        str(name): dataset_of(part, prints=comm.rank == 0) if isinstance(part, DataLoader) else part
        for name, part in data.items()
    }
    if all(columns(part) is not None for part in parts.values()):
        residents = [cast("Resident", as_split(part, settings, comm, seed=seed)).tensors for part in parts.values()]
        if any(tensors.keys() != residents[0].keys() for tensors in residents):
            raise BadInput(f"test sets {', '.join(parts)}: their columns have different names. Use the same names.")
        joined: Data = {name: torch.cat([tensors[name] for tensors in residents]) for name in residents[0]}
        lengths = [len(next(iter(tensors.values()))) for tensors in residents]
    elif all(_is_indexed(part) and not isinstance(part, Mapping) for part in parts.values()):
        joined, lengths = ConcatDataset(parts.values()), [len(part) for part in parts.values()]
    else:
        kinds = ", ".join(f"{name} is a {type(part).__name__}" for name, part in parts.items())
        raise BadInput(f"test sets: {kinds}. Use Datasets with __getitem__ and __len__ for all, or dicts of columns.")
    ends = accumulate(lengths, initial=0)
    return as_split(joined, settings, comm, seed=seed), {
        name: range(*two) for name, two in zip(parts, pairwise(ends), strict=True)
    }


def _is_indexed(data: Data) -> bool:
    return _has_numbers(data) and hasattr(data, "__len__")


def _has_numbers(data: Data) -> bool:
    nothing = Dataset.__getitem__  # raises NotImplementedError
    return not isinstance(data, IterableDataset) and getattr(type(data), "__getitem__", nothing) is not nothing


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
    loaded.read_here({sample for sample in (0, 1, len(loaded) - 1) if sample in range(len(loaded))})
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
            self._empty = moved({name: values[:0] for name, values in self.read_here([0]).items()}, device)
        return self._empty
