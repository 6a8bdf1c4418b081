"""A model as a row of blocks, of which each stage holds some, under the names of the whole model.

N samples of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inputs = Sequence[Tensor]  # what the whole model is called with, samples first
# From the whole model, or what is left of it, with the output of the block before (None for the first) and the inputs.
Run = Callable[[nn.Module, Tensor | None, Inputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a model that is never cut."""

    name: str  # of what it is in the model
    modules: tuple[str, ...]  # the names of those that it needs
    run: Run


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All of a model, in the order of its forward pass."""

    row: tuple[Block, ...]
    batch_dims: int  # leading dimensions of the inputs that those of each block's output but the last's begin with

    def __len__(self) -> int:
        return len(self.row)


def run_all(
    model: nn.Module, blocks: Sequence[Block], hidden: Tensor | None, inputs: Inputs, *, recompute: bool = False
) -> Tensor:
    """The output of these blocks of a model, one after the other.

    With `recompute` the backward pass runs each block once more in place of keeping what is inside (Chen et al. 2016).
    """
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            modules = [model.get_submodule(name) for name in block.modules]
            again = partial(_again, [buffer for module in modules for buffer in module.buffers()])
            hidden = checkpoint(block.run, model, hidden, inputs, use_reentrant=False, context_fn=again)
        else:
            hidden = block.run(model, hidden, inputs)
    assert hidden is not None
    return hidden


def _again(buffers: Sequence[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of both runs: the second one leaves running statistics as the first has left them."""
    return nullcontext(), _unchanged(buffers)


@contextmanager
def _unchanged(buffers: Sequence[Tensor]) -> Iterator[None]:
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def keep_only(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Take from the model all that these blocks do not need; what is left keeps its names."""
    kept = [name for block in blocks for name in block.modules]
    for name in [name for name, _ in model.named_modules() if name]:
        parent, _, own = name.rpartition(".")
        needed = any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in kept)
        if not needed and _has(model, name):
            setattr(model.get_submodule(parent), own, nn.Identity())


def _has(model: nn.Module, name: str) -> bool:
    """Whether the module is still there."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
