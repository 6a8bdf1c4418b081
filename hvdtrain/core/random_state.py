"""The state of torch's random number generators."""

import torch
from torch import Tensor


def random_state() -> list[Tensor]:
    """Return the states of the generators of the host and of this process's GPU."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def restore_random_state(states: list[Tensor]) -> None:
    """Restore the generators: the same random numbers are drawn again."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
