"""Cuts a sequence of blocks into stages: where the user says, or by the measured time of each block."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.blocks import Block, Blocks, Inputs
from hvdtrain.core.model.modes import train
from hvdtrain.core.model.state import unchanged
from hvdtrain.core.step import precision_context
from hvdtrain.loop.draft import Job
from hvdtrain.settings.safety.exits import BadInput

_REPEATS = 4  # of each block; the first one chooses kernels


@dataclass(frozen=True, kw_only=True)
class Passage:
    """The output and the time of a block, as JSON values."""

    time_ms: float  # forward and backward of one micro-batch
    trailing_shape: list[int]  # dimensions of its output after the batch dimensions
    dtype: str
    memory_format: str

    def in_format(self, hidden: Tensor) -> Tensor:
        """Return the output in the memory format in which it is sent."""
        return hidden.contiguous(memory_format=_torchs(self.memory_format))

    def make_buffer(self, inputs: Inputs, batch_dims: int, device: torch.device) -> Tensor:
        """Return an empty tensor for the output to these inputs."""
        shape = (*inputs[0].shape[:batch_dims], *self.trailing_shape)
        memory_format = _torchs(self.memory_format)
        return torch.empty(shape, dtype=_torchs(self.dtype), device=device, memory_format=memory_format)


def _torchs(name: str) -> Any:
    """Return torch's constant of this name, such as torch.float32."""
    return getattr(torch, name.removeprefix("torch."))


def measure_on_all(job: Job) -> list[Passage]:
    """Measure the blocks on rank 0 with one micro-batch, and return the result on all ranks."""
    measured = list[Passage]()
    if job.comm.rank == 0:
        context = precision_context(job.device, job.precision)
        measured = measure_blocks(job.model, require_blocks(job.cuts.blocks), job.example(), job.device, context)
    return [Passage(**fields) for fields in job.comm.allgather([asdict(passage) for passage in measured])[0]]


def measure_blocks(
    model: nn.Module, blocks: Blocks, inputs: Inputs, device: torch.device, context: torch.autocast
) -> list[Passage]:
    """Measure each block of a model on the host, one at a time on the device, with one micro-batch.

    The model, including its running statistics, is not changed. It uses the memory format of the inputs.
    """
    inputs = [tensor.to(device) for tensor in inputs]
    passages, hidden = list[Passage](), None
    train(model)
    with unchanged(model.modules()):
        model.to(memory_format=_format_of(inputs[0]))
        for block in blocks.row:
            modules = [model.get_submodule(name).to(device) for name in block.modules]
            hidden, time_ms = _measure(model, block, hidden, inputs, context)
            for module in modules:
                module.zero_grad(set_to_none=True)
                module.to("cpu")
            passages.append(
                Passage(
                    time_ms=time_ms,
                    trailing_shape=list(hidden.shape[blocks.batch_dims :]),
                    dtype=str(hidden.dtype),
                    memory_format=str(_format_of(hidden)),
                )
            )
    model.to(memory_format=torch.contiguous_format)
    return passages


def _measure(
    model: nn.Module, block: Block, hidden: Tensor | None, inputs: Inputs, context: torch.autocast
) -> tuple[Tensor, float]:
    """Return the block's output, and the least milliseconds of a forward and backward pass."""
    times_s = []
    for _ in range(_REPEATS):
        if hidden is not None:
            hidden = hidden.detach().requires_grad_()
        start_s = _synchronized_time_s(inputs[0].device)
        with context:
            output = block.run(model, hidden, inputs)
        output.backward(torch.ones_like(output))
        times_s.append(_synchronized_time_s(output.device) - start_s)
    return output.detach(), 1000 * min(times_s)


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


def require_blocks(blocks: Blocks | None) -> Blocks:
    """Return the blocks; BadInput if the program does not say where its model may be cut."""
    if blocks is None:
        raise BadInput("--stages, --recompute: this program does not say where its model may be cut. Leave them out.")
    return blocks


def require_names(model: nn.Module, blocks: Blocks) -> None:
    """Raise BadInput if blocks share a parameter under different names, or if a parameter is in none of them."""
    names: dict[int, str] = {}
    for block in blocks.row:
        for module in block.modules:
            for name, parameter in model.get_submodule(module).named_parameters(module):
                first = names.setdefault(id(parameter), name)
                if first != name:
                    raise BadInput(f"--stages: {first} and {name} are one parameter in two blocks. Give each its own.")
    if others := [name for name, parameter in model.named_parameters() if id(parameter) not in names]:
        raise BadInput(f"--stages: {others[0]} is in no block. Put it into a module of one block.")


def require_parameters(model: nn.Module, blocks: Blocks, cuts: Sequence[int]) -> None:
    """Raise BadInput if a stage that these cuts make has nothing to train."""
    for start, end in pairwise([0, *cuts, len(blocks)]):
        own = [model.get_submodule(module) for block in blocks.row[start:end] for module in block.modules]
        if not any(True for module in own for _ in module.parameters()):
            raise BadInput(
                f"--stages {','.join(map(str, [0, *cuts]))}: the stage that begins with block {start} "
                f"({blocks.row[start].name}) has no parameters. Give the first block of each stage, or start fewer."
            )


def require_stages(blocks: Blocks, stages: int, cuts: Sequence[int] | None) -> None:
    """Raise BadInput if the model has too few blocks for this number of stages, or for these cuts."""
    if stages > len(blocks):
        raise BadInput(f"--stages {stages}: the model has {len(blocks)} blocks. Pass {len(blocks)} or fewer.")
    if cuts is not None and cuts[-1] >= len(blocks):
        starts = ",".join(map(str, [0, *cuts]))
        raise BadInput(f"--stages {starts}: the model has blocks 0 to {len(blocks) - 1}. Pass no higher number.")
