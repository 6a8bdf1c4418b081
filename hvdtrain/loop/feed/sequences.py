"""A split of sequences of unequal lengths, mapped from a file. N sequences of a batch, L tokens, S of the split."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.task import Batch
from hvdtrain.loop.feed.feed import copied, prefetched

_MULTIPLE = 8  # of a batch's length on a GPU: for tensor cores, and so that a compiled model sees few shapes


class Sequences:
    """Token numbers of concatenated sequences, with one label per sequence."""

    reads_files, readers = True, 0

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger[Any]],
        *,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        labels: NDArray[np.int64],
        content: str | None = None,
    ) -> None:
        """Map the sequences; `starts` (S,) are their positions in `tokens`, with `lengths` (S,) and `labels` (S,)."""
        self.content = content
        self.lengths = torch.from_numpy(lengths)
        self._tokens, self._starts, self._labels = tokens, starts, labels
        self._longest = int(lengths.max(initial=1))
        self._stream: torch.cuda.Stream | None = None  # of the copies to the device

    def __len__(self) -> int:
        return len(self._labels)

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        multiple = _MULTIPLE if device.type == "cuda" else 1
        host_batches = (self._read(samples, multiple) for samples in indices)
        if device.type != "cuda" or phases.isolated:
            device_batches = copied(host_batches, device, phases)
        else:
            self._stream = self._stream or torch.cuda.Stream(device)
            pinned = ({name: tensor.pin_memory() for name, tensor in batch.items()} for batch in host_batches)
            device_batches = prefetched(pinned, device, self._stream, phases)
        for samples, batch in zip(indices, device_batches, strict=True):
            lengths = self.lengths[samples]  # lengths stay on the host, which counts by them
            yield {**batch, "lengths": lengths.pin_memory() if device.type == "cuda" else lengths}

    def _read(self, samples: Tensor, multiple: int) -> Batch:
        """Read tokens (N, L), padded with zeros, and labels (N,)."""
        indices = samples.numpy()
        starts, lengths = self._starts[indices], self.lengths[samples].numpy()
        longest = min(-(-int(lengths.max(initial=1)) // multiple) * multiple, self._longest)
        positions = np.arange(longest)
        is_token = positions < lengths[:, None]
        tokens = np.zeros(is_token.shape, dtype=np.int64)
        tokens[is_token] = self._tokens[(starts[:, None] + positions)[is_token]]
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(self._labels[indices])}
