"""Linear layers sliced over the ranks of a replica (Shoeybi et al. 2019), in torch.distributed's world.

T ranks of a replica, I inputs and O outputs of a whole layer.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class _CopyToSlices(torch.autograd.Function):
    """Passes equal inputs to the slices; backward sums the slices' gradients."""

    @staticmethod
    def forward(_: Any, full: Tensor) -> Tensor:
        return full.view_as(full)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return _sum_over_ranks(gradients[0])


class _SumSlices(torch.autograd.Function):
    """Sums the outputs of the slices; the result is equal on all ranks."""

    @staticmethod
    def forward(_: Any, partial: Tensor) -> Tensor:
        return _sum_over_ranks(partial)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


sent = Counter[str]()  # "summed_bytes" with the other slices, by this process; autograd functions cannot store it


def _sum_over_ranks(partial: Tensor) -> Tensor:
    """Sum in fp32, for any input type."""
    total = partial.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if total.numel():
        dist.all_reduce(total)
        sent["summed_bytes"] += total.nbytes
    return total.to(partial.dtype)


class ColumnParallelLinear(nn.Linear):
    """O/T of the outputs, from all inputs, which must have passed through `send_to_slices`."""

    def __init__(self, full: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__(full.in_features, full.out_features // ranks, device="meta")
        self.weight = _slice_of(full.weight, 0, rank, ranks)  # (O/T, I)
        self.bias = _slice_of(full.bias, 0, rank, ranks)


class RowParallelLinear(nn.Linear):
    """All outputs, from I/T of the inputs, by a sum over the ranks."""

    def __init__(self, full: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__(full.in_features // ranks, full.out_features, device="meta")
        self.weight = _slice_of(full.weight, 1, rank, ranks)  # (O, I/T)
        self.bias = full.bias

    def forward(self, inputs: Tensor) -> Tensor:
        partial = F.linear(inputs, self.weight)
        full: Tensor = _SumSlices.apply(partial.float())
        return (full + self.bias).to(partial.dtype)


def _slice_of(full: Tensor, dim: int, rank: int, ranks: int) -> nn.Parameter:
    return nn.Parameter(full.detach().chunk(ranks, dim)[rank].clone())


def send_to_slices(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of modules whose first layers are columns."""
    return _CopyToSlices.apply(inputs[0]), *inputs[1:]


@contextmanager
def per_rank_draws(rank: int) -> Iterator[None]:
    """Draw different random numbers on each rank; afterwards all ranks draw equal numbers again.

    They are derived from the common ones, so that a recomputed forward pass draws the same numbers.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed + rank)
        yield


def sliced_parameters(model: nn.Module) -> dict[str, int]:
    """Return the split dimension of each sliced parameter; other parameters are whole on all ranks."""
    dims: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear):
            dims |= {f"{name}.weight": 0, f"{name}.bias": 0}
        if isinstance(module, RowParallelLinear):
            dims[f"{name}.weight"] = 1
    return dims
