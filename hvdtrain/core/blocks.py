"""A model as a row of blocks, and how it may lie on several ranks. N samples of a micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Inputs = Sequence[Tensor]  # what the whole model is called with, samples first
# From the whole model, or what is left of it, with the output of the block before (None for the first) and the inputs.
Run = Callable[[nn.Module, Tensor | None, Inputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a model that is never cut."""

    name: str  # of what it is in the model
    modules: tuple[str, ...]  # the names of those that it needs
    run: Run
    uses: frozenset[int] | None = None  # the places of the inputs whose values it uses, beside shapes; None: maybe all


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All of a model, in the order of its forward pass."""

    row: tuple[Block, ...]
    batch_dims: int  # leading dimensions of the inputs that those of each block's output but the last's begin with

    def __len__(self) -> int:
        return len(self.row)


def blocks_of(model: nn.Module) -> Blocks | None:
    """A Sequential's children are its blocks, from inputs of which the first dimension is N; None of another model."""
    if not isinstance(model, nn.Sequential):
        return None

    def block(name: str, *, is_first: bool) -> Block:
        def run(whole: nn.Module, hidden: Tensor | None, inputs: Inputs) -> Tensor:
            outputs: Tensor = whole.get_submodule(name)(inputs[0] if hidden is None else hidden)
            return outputs

        return Block(name=name, modules=(name,), run=run, uses=frozenset({0} if is_first else ()))

    names = [name for name, _ in model.named_children()]
    return Blocks(row=tuple(block(name, is_first=name == names[0]) for name in names), batch_dims=1)


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How a model may lie on several ranks."""

    blocks: Blocks | None = None  # between which it may be cut
    split_layers: Callable[[Any, int, int], object] | None = None  # keeps what rank r of n holds of each layer
