"""Runs and keeps some blocks of a model, under the names of the whole model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.core.blocks import Block, Inputs, Run
from hvdtrain.core.model.modes import set_modes
from hvdtrain.core.model.state import unchanged


def run_all(
    model: nn.Module, blocks: Sequence[Block], hidden: Tensor | None, inputs: Inputs, *, recompute: bool = False
) -> Tensor:
    """Run these blocks of a model in order, and return the output.

    With `recompute`, backward runs each block again instead of keeping its activations (Chen et al. 2016).
    """
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            modules = [model.get_submodule(name) for name in block.modules]
            contexts = partial(_rerun_contexts, [layer for module in modules for layer in module.modules()])
            hidden = checkpoint(block.run, model, hidden, inputs, use_reentrant=False, context_fn=contexts)
        else:
            hidden = block.run(model, hidden, inputs)
    assert hidden is not None
    return hidden


def _rerun_contexts(layers: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of both runs; the second one trains the same layers as the first."""
    return nullcontext(), _rerun([(layer, layer.training) for layer in layers])


@contextmanager
def _rerun(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set whether layers train; running statistics are not changed."""
    modes_before = [(layer, layer.training) for layer, _ in modes]
    set_modes(modes)
    try:
        with unchanged(layer for layer, _ in modes):
            yield
    finally:
        set_modes(modes_before)


def compile_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks, each of which torch compiles at its first run."""
    return tuple(replace(block, run=torch.compile(_in_own_code(block.run))) for block in blocks)


def _in_own_code(run: Run) -> Run:
    """Give the function a separate code object: torch compiles at most 8 variants of one, then stops compiling."""

    def call(model: nn.Module, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        return run(model, hidden, inputs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def keep_blocks(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Remove everything from the model that these blocks do not need; the rest keeps its names."""
    kept = [f"{name}." for block in blocks for name in block.modules]

    def prune(parent: nn.Module, path: str) -> None:
        for name, child in [*parent.named_children()]:
            own = f"{path}{name}."
            if any(one.startswith(own) and one != own for one in kept):
                prune(child, own)
            elif not any(own.startswith(one) for one in kept):
                setattr(parent, name, nn.Identity())

    prune(model, "")
