"""Chooses where to cut a sequence of blocks, from the measured time of each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from hvdtrain.core.blocks import Blocks, Inputs
from hvdtrain.model.modes import train
from hvdtrain.model.state import unchanged

_REPEATS = 4  # of each block; the first one chooses kernels


@dataclass(frozen=True, kw_only=True)
class Passage:
    """The output and the time of a block."""

    time_ms: float  # forward and backward of one micro-batch
    trailing_shape: tuple[int, ...]  # dimensions of its output after the batch dimensions
    dtype: torch.dtype
    memory_format: torch.memory_format

    def make_buffer(self, inputs: Inputs, batch_dims: int, device: torch.device) -> Tensor:
        """Return an empty tensor for the output to these inputs."""
        shape = (*inputs[0].shape[:batch_dims], *self.trailing_shape)
        return torch.empty(shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


def measure_blocks(
    model: nn.Module, blocks: Blocks, inputs: Inputs, device: torch.device, context: torch.autocast
) -> list[Passage]:
    """Measure each block of a model on the host, one at a time on the device, with one micro-batch.

    The model, including its running statistics, is not changed. It uses the memory format of the inputs. On meta, one
    block at a time gets memory.
    """
    inputs = [tensor.to(device) for tensor in inputs]
    train(model)
    with unchanged(model.modules()):
        model.to(memory_format=_format_of(inputs[0]))  # type: ignore[call-overload]
        passages = _measure(model, blocks, inputs, device, context)
    if not next(model.parameters()).is_meta:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return passages


def _measure(
    model: nn.Module, blocks: Blocks, inputs: Inputs, device: torch.device, context: torch.autocast
) -> list[Passage]:
    home = next(model.parameters()).device
    passages: list[Passage] = []
    hidden: Tensor | None = None
    for block in blocks.row:
        modules = [model.get_submodule(name) for name in block.modules]
        for module in modules:
            _bring(module, device)
        times_s = []
        for _ in range(_REPEATS):
            if hidden is not None:
                hidden = hidden.detach().requires_grad_()
            start_s = _synchronized_time_s(device)
            with context:
                output = block.run(model, hidden, inputs)
            output.backward(torch.ones_like(output))
            times_s.append(_synchronized_time_s(device) - start_s)
        for module in modules:
            module.zero_grad(set_to_none=True)
            module.to(home)
        hidden = output.detach()
        passages.append(
            Passage(
                time_ms=1000 * min(times_s),
                trailing_shape=tuple(hidden.shape[blocks.batch_dims :]),
                dtype=hidden.dtype,
                memory_format=_format_of(hidden),
            )
        )
    return passages


def _bring(module: nn.Module, device: torch.device) -> None:
    """Move to the device; tensors on meta get arbitrary small values."""

    def bring(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        values = torch.zeros_like(tensor, device=device)
        return values.normal_(std=0.02) if values.is_floating_point() else values

    module._apply(bring)


def _format_of(tensor: Tensor) -> torch.memory_format:
    return torch.contiguous_format if tensor.is_contiguous() else torch.channels_last


def _synchronized_time_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def choose_cuts(times_ms: Sequence[float], stages: int) -> list[int]:
    """Return the first block of each stage after the first, so that the slowest stage is as fast as possible."""

    @cache
    def best(first: int, stages_left: int) -> tuple[float, tuple[int, ...]]:
        """Return the time of the slowest of `stages_left` stages starting at block `first`, and their cuts."""
        if stages_left == 1:
            return sum(times_ms[first:]), ()
        options = []
        for cut in range(first + 1, len(times_ms) - stages_left + 2):
            slowest_rest, cuts = best(cut, stages_left - 1)
            options.append((max(sum(times_ms[first:cut]), slowest_rest), (cut, *cuts)))
        return min(options)

    return list(best(0, stages)[1])
