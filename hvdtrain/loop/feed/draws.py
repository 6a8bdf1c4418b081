"""Random numbers that a Dataset draws while it is read: one stream for each sample."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import Dataset, get_worker_info

Key = tuple[int | None, list[int]]  # the epoch, None for an evaluation, and the samples of a batch

_READING = 2  # separates these streams from those of the order and of tasks, which begin with 0 and 1
_TORCH = torch.default_generator
_NUMPY = np.random.MT19937(0)  # numpy's generator while a batch is read; restoring the state of another takes 100 us
_FIRST = np.random.RandomState(0).random_sample()


class KeyedDraws(Dataset[Any]):
    """Batches of a Dataset whose draws from torch, numpy and random depend on seed, epoch and sample only.

    Seeding three generators takes longer than reading a row of a table. So a batch is read without, until one has drawn
    numbers: that batch is read again, and from then on each sample has its seed. The generators of this process, from
    which a rank's model draws, stay as they are.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._is_drawing = False
        self._twin: random.Random | None = None  # draws as `random` does in a reader process, where nothing else draws

    def __getitems__(self, key: Key) -> list[Any]:
        """Read the samples of a batch."""
        epoch, samples = key
        if self._twin is None and get_worker_info() is not None:
            self._twin = random.Random()  # noqa: S311
            self._twin.setstate(random.getstate())
        kept = _Generators(self._twin)
        try:
            if not self._is_drawing:
                batch = self._read(samples)
                self._is_drawing = kept.are_drawn_from()
            if self._is_drawing:
                batch = [self._read_keyed(sample, epoch) for sample in samples]
        finally:
            kept.restore()
        return batch

    def _read(self, samples: list[int]) -> list[Any]:
        read = getattr(self._dataset, "__getitems__", None)
        return [self._dataset[sample] for sample in samples] if read is None else read(samples)

    def _read_keyed(self, sample: int, epoch: int | None) -> Any:
        key = hash((self._seed, -1 if epoch is None else epoch, sample, _READING)) % 2**64
        _TORCH.manual_seed(key)  # torch.manual_seed takes 250 us, for GPUs too
        np.random.seed(key >> 32)  # noqa: NPY002 (the same generator as torch's, which takes the lower half)
        random.seed(key)
        return self._dataset[sample]


class _Generators:
    """The generators of this process, to be restored after a batch was read."""

    def __init__(self, twin: random.Random | None) -> None:
        """Keep their states; reading begins with numpy's at a known one. In a reader process `random` has a twin."""
        self._twin = twin
        self._torch, self._numpy = _TORCH.get_state(), mtrand.get_bit_generator()
        self._random = random.getstate() if twin is None else None  # takes 10 us
        mtrand.set_bit_generator(_NUMPY)
        np.random.seed(0)  # noqa: NPY002
        self._is_used = True

    def are_drawn_from(self) -> bool:
        """Return whether numbers were drawn; called once, since it draws from numpy."""
        self._is_used = not (
            np.random.random_sample() == _FIRST  # noqa: NPY002
            and self._is_random_unused()
            and _TORCH.get_state().numpy().tobytes() == self._torch.numpy().tobytes()  # faster than torch.equal
        )
        return self._is_used

    def _is_random_unused(self) -> bool:
        if self._random is None:
            return self._twin is not None and random.random() == self._twin.random()  # noqa: S311
        words, kept = random.getstate()[1], self._random[1]
        return bool((words[0], words[-1]) == (kept[0], kept[-1]))  # comparing all of them takes 10 us

    def restore(self) -> None:
        mtrand.set_bit_generator(self._numpy)
        if self._is_used:
            _TORCH.set_state(self._torch)
            if self._random is not None:
                random.setstate(self._random)
