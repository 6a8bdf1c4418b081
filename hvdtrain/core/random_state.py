"""The random number generators of this process: torch's, numpy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, numpy and `random`."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that programs draw from)
    random.seed(seed)


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Undo what the body draws from the generators of torch, numpy and `random`."""
    before = all_states()
    try:
        yield
    finally:
        restore_all(before)


def all_states() -> tuple[Any, ...]:
    """Return the states of the generators of torch, numpy and `random`."""
    return random_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def restore_all(states: tuple[Any, ...]) -> None:
    """Restore these generators."""
    of_torch, of_numpy, of_python = states
    restore_random_state(of_torch)
    np.random.set_state(of_numpy)  # noqa: NPY002
    random.setstate(of_python)


def random_state() -> list[Tensor]:
    """Return the states of torch's generators of the host and of this process's GPU."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def restore_random_state(states: list[Tensor]) -> None:
    """Restore torch's generators: the same random numbers are drawn again."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
