"""Running and keeping some blocks of a model, under the names of the whole model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.core.blocks import Block, Inputs


def run_all(
    model: nn.Module, blocks: Sequence[Block], hidden: Tensor | None, inputs: Inputs, *, recompute: bool = False
) -> Tensor:
    """The output of these blocks of a model, one after the other.

    With `recompute` the backward pass runs each block once more in place of keeping what is inside (Chen et al. 2016).
    """
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            modules = [model.get_submodule(name) for name in block.modules]
            contexts = partial(_rerun_contexts, [buffer for module in modules for buffer in module.buffers()])
            hidden = checkpoint(block.run, model, hidden, inputs, use_reentrant=False, context_fn=contexts)
        else:
            hidden = block.run(model, hidden, inputs)
    assert hidden is not None
    return hidden


def _rerun_contexts(buffers: Sequence[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of both runs: the second one leaves running statistics as the first has left them."""
    return nullcontext(), _restore_buffers(buffers)


@contextmanager
def _restore_buffers(buffers: Sequence[Tensor]) -> Iterator[None]:
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def keep_blocks(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Take from the model all that these blocks do not need; what is left keeps its names."""
    kept = [name for block in blocks for name in block.modules]
    for name in [name for name, _ in model.named_modules() if name]:
        parent, _, child = name.rpartition(".")
        is_needed = any(f"{name}.".startswith(f"{module}.") or module.startswith(f"{name}.") for module in kept)
        if not is_needed and _has(model, name):
            setattr(model.get_submodule(parent), child, nn.Identity())


def _has(model: nn.Module, name: str) -> bool:
    """Whether the module is still there."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
