"""A split of sequences of unequal lengths, mapped from a file. N sequences of a batch, L tokens, S of the split."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.core.feed import copied, prefetched
from hvdtrain.core.task import Batch
from hvdtrain.profiling.phases import OFF, Phases

_MULTIPLE = 8  # of a batch's length on a GPU: tensor cores want it, and a compiled model sees few shapes


class Sequences:
    """Numbers of tokens, one sequence after the other, and each one's label."""

    reads_files = True

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger[Any]],
        *,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        labels: NDArray[np.int64],
    ) -> None:
        """`starts` (S,) are where in `tokens` the sequences of these `lengths` (S,) and `labels` (S,) begin."""
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
        read = (self._read(samples, multiple) for samples in indices)
        if device.type != "cuda" or phases.alone:
            arriving = copied(read, device, phases)
        else:
            self._stream = self._stream or torch.cuda.Stream(device)
            arriving = prefetched(({name: one.pin_memory() for name, one in batch.items()} for batch in read), device,
                                  self._stream, phases)  # fmt: skip
        for samples, batch in zip(indices, arriving, strict=True):
            lengths = self.lengths[samples]  # they stay on the host, which counts by them
            yield {**batch, "lengths": lengths.pin_memory() if device.type == "cuda" else lengths}

    def _read(self, samples: Tensor, multiple: int) -> Batch:
        """Tokens (N, L), with zeros behind the shorter ones, and labels (N,)."""
        chosen = samples.numpy()
        starts, lengths = self._starts[chosen], self.lengths[samples].numpy()
        longest = min(-(-int(lengths.max(initial=1)) // multiple) * multiple, self._longest)
        place = np.arange(longest)
        inside = place < lengths[:, None]
        tokens = np.zeros(inside.shape, dtype=np.int64)
        tokens[inside] = self._tokens[(starts[:, None] + place)[inside]]
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(self._labels[chosen])}
