"""Random numbers that a Dataset draws while it is read: one stream for each sample."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Key = tuple[int | None, list[int]]  # the epoch, None for an evaluation, and the samples of a batch

_READING = 2  # separates these streams from those of the order and of tasks, which begin with 0 and 1
_TORCH = torch.default_generator


class KeyedDraws(Dataset[Any]):
    """Batches of a Dataset whose draws from torch, numpy and random depend on seed, epoch and sample only.

    Seeding three generators takes longer than reading a row of a table. So a batch is read without, until one has drawn
    numbers: that batch is read again, and from then on each sample has its seed. The generators of this process, from
    which a rank's model draws, stay as they are.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._is_drawing = False

    def __getitems__(self, key: Key) -> list[Any]:
        """Read the samples of a batch."""
        epoch, samples = key
        before = _states()
        try:
            if not self._is_drawing:
                batch = self._read(samples)
                self._is_drawing = _states() != before
            if self._is_drawing:
                batch = [self._read_keyed(sample, epoch) for sample in samples]
        finally:
            if self._is_drawing or _states() != before:
                _restore(before)
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


def _states() -> bytes:
    """Return the states of all generators, in a form that can be compared."""
    states = _TORCH.get_state().numpy(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    return pickle.dumps(states)


def _restore(states: bytes) -> None:
    of_torch, of_numpy, of_random = pickle.loads(states)  # noqa: S301 (its own)
    _TORCH.set_state(torch.from_numpy(of_torch))
    np.random.set_state(of_numpy)  # noqa: NPY002
    random.setstate(of_random)
