"""Tensors and map-style Datasets as splits. N samples of a batch, S of a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.settings import FileSettings
from hvdtrain.core.task import Batch
from hvdtrain.feed.feed import Resident, Split
from hvdtrain.feed.readers import Readers, count_workers
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput

Data = Split | Tensor | Sequence[Any] | Mapping[str, Tensor] | Dataset[Any]

PAIR = ("inputs", "targets")  # names for the elements of a sample without names


def as_split(data: Data, settings: FileSettings, comm: Comm) -> Split:
    """Convert the samples to a split; BadInput for data that cannot be indexed."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, Sequence) and all(isinstance(values, Tensor) for values in data):
        data = named(data)
    if isinstance(data, Mapping):
        return Resident(**_equally_long(data))
    if hasattr(data, "batches"):
        return cast("Split", data)
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise BadInput(
            f"{type(data).__name__}: its samples have no numbers. Use tensors, or a Dataset with __getitem__ and "
            "__len__: ranks take their parts of it, and a resumed run the rest."
        )
    dataset = cast("Dataset[Any]", data)
    loaded = Loaded(dataset, workers=count_workers(settings, comm), prefetch=settings.prefetch)
    if len(loaded):
        collate([dataset[0]])  # reject samples that cannot be collated before the run exists
    return loaded


def named(values: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs, or inputs and targets, by name."""
    if len(values) > len(PAIR):
        raise BadInput(
            f"a sample of {len(values)} values without names: only inputs and targets can do without. Use a dict."
        )
    return dict(zip(PAIR, values, strict=False))


def _equally_long(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    _require_tensors(tensors)
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) != 1:
        of_tensors = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BadInput(
            f"tensors of a split: must have equally many samples ({of_tensors or 'there are none'}). Correct their "
            "lengths."
        )
    return tensors


def _require_tensors(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) or not value.dim():
            kind = "a scalar" if isinstance(value, Tensor) else type(value).__name__
            raise BadInput(
                f"{name!r} is {kind}: only tensors with samples first are supported. Convert it with torch.as_tensor."
            )


class Loaded:
    """A split with samples from a Dataset, read one by one."""

    reads_files = True
    content: str | None = None

    def __init__(self, dataset: Dataset[Any], *, workers: int, prefetch: int) -> None:
        self._dataset = dataset
        self._pool = Readers(dataset, collate, workers=workers, prefetch=prefetch)
        self.readers = self._pool.processes
        self._empty: Batch | None = None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        for batch in self._pool.read(indices, Tensor.tolist, device, phases):
            yield batch or self._no_samples(device)

    def _no_samples(self, device: torch.device) -> Batch:
        """Return an empty batch, for a rank without samples in a small last batch."""
        if self._empty is None:
            self._empty = {name: tensor[:0].to(device) for name, tensor in collate([self._dataset[0]]).items()}
        return self._empty


def collate(samples: list[Any]) -> Batch:
    """Collate samples into a batch, by name; empty if there are none."""
    if not samples:
        return {}
    batch = default_collate(samples)
    if isinstance(batch, Tensor):
        batch = (batch,)
    batch = batch if isinstance(batch, dict) else named(batch)
    _require_tensors(batch)
    return batch
