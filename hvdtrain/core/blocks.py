"""A model as a sequence of blocks, and how it can be split over ranks. N samples of a micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Inputs = Sequence[Tensor]  # the arguments of the whole model, samples first
# Arguments: the whole model or the part that this rank keeps, the output of the previous block (None for the first) and
# the inputs.
Run = Callable[[nn.Module, Tensor | None, Inputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a model that is never cut."""

    name: str  # of the block in the model
    modules: tuple[str, ...]  # names of the modules that the block needs
    run: Run


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All blocks of a model, in the order of its forward pass."""

    row: tuple[Block, ...]
    batch_dims: int  # number of leading input dimensions that every block's output shares, except the last block's

    def __len__(self) -> int:
        return len(self.row)


def blocks_of(model: nn.Module) -> Blocks | None:
    """Return the children of a Sequential as blocks, or None for another model. Dimension 0 of the inputs is N."""
    if not isinstance(model, nn.Sequential):
        return None

    def block(name: str) -> Block:
        def run(whole: nn.Module, hidden: Tensor | None, inputs: Inputs) -> Tensor:
            outputs: Tensor = whole.get_submodule(name)(inputs[0] if hidden is None else hidden)
            return outputs

        return Block(name=name, modules=(name,), run=run)

    return Blocks(row=tuple(block(name) for name, _ in model.named_children()), batch_dims=1)


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How a model can be split over several ranks.

    >>> from hvdtrain.core.blocks import blocks_of
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> cuts = hvdtrain.Cuts(blocks=blocks_of(model))  # a Sequential has these without Cuts
    >>> [block.name for block in cuts.blocks.row]
    ['0', '1', '2']
    """

    blocks: Blocks | None = None  # the model may be cut between them; None: nowhere
    split_layers: Callable[[Any, int, int], object] | None = None  # keeps only the share of rank r of n in each layer
