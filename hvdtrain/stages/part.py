"""One rank's stage of a model: its blocks, and what comes to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput
from hvdtrain.stages.blocks import Block, Blocks, Inputs, keep_only, run_all
from hvdtrain.stages.cut import Passage, fastest, measure

if TYPE_CHECKING:
    from hvdtrain.stages.pipeline import Pipeline

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_FORMATS = {str(one): one for one in (torch.contiguous_format, torch.channels_last)}


@dataclass(frozen=True, kw_only=True)
class Part:
    """The blocks of this rank's stage, under way in its pipeline."""

    blocks: Blocks
    starts: tuple[int, ...]  # the first block of each stage
    passages: tuple[Passage, ...]  # of all blocks
    stage: int
    tied: tuple[str, ...] = ()  # parameters that another stage has too
    pipeline: "Pipeline"
    recompute: bool = False  # what is inside the blocks, in the backward pass

    @property
    def own(self) -> tuple[Block, ...]:
        """This stage's blocks."""
        return own_blocks(self.blocks, self.starts, self.stage)

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == len(self.starts) - 1

    def run(self, model: nn.Module, received: Tensor | None, inputs: Inputs) -> Tensor:
        """What this stage makes of one micro-batch: what the next one receives, or the model's outputs."""
        if received is not None:
            # Of a leaf autocast keeps the copy in bf16: the gradients of its uses would then be summed in bf16.
            received = received.view_as(received)
        recompute = self.recompute and len(inputs[0]) > 1  # see batch_norm.frozen
        hidden = run_all(model, self.own, received, inputs, recompute=recompute)
        if self.is_last:
            return hidden
        return hidden.contiguous(memory_format=self.passages[self.starts[self.stage + 1] - 1].memory_format)

    def room(self, inputs: Inputs, device: torch.device) -> Tensor:
        """An empty tensor for what comes from the stage before."""
        return self.passages[self.starts[self.stage] - 1].room(inputs, self.blocks.batch_dims, device)

    def sum_tied(self, model: nn.Module) -> None:
        """Let the gradients of parameters that two stages hold be the sum of both; on both the same bits."""
        for name in self.tied:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            theirs = torch.empty_like(gradient)
            other = len(self.starts) - 1 - self.stage  # of the first and the last stage
            for begun in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, gradient, other), dist.P2POp(dist.irecv, theirs, other)]
            ):
                begun.wait()
            gradient.add_(theirs)

    def twice(self, model: nn.Module) -> set[int]:
        """The identities of parameters that a stage before this one counts already."""
        return {id(model.get_parameter(name)) for name in self.tied} if self.stage else set()

    def sentence(self) -> str:
        """Who has what, for people."""
        stages = []
        for stage in range(len(self.starts)):
            blocks = own_blocks(self.blocks, self.starts, stage)
            first = self.starts[stage]
            took_ms = sum(passage.time_ms for passage in self.passages[first : first + len(blocks)])
            stages.append(f"{blocks[0].name} to {blocks[-1].name} ({took_ms:.3g} ms)")
        at = ",".join(map(str, self.starts[1:]))
        return f"{len(stages)} stages: {', '.join(stages)}; the same again with --stages-at {at}"


def own_blocks(blocks: Blocks, starts: Sequence[int], stage: int) -> tuple[Block, ...]:
    """Those of one stage."""
    return blocks.row[starts[stage] : (*starts, len(blocks))[stage + 1]]


def require_stages(blocks: Blocks, stages: int, at: str | None) -> tuple[int, ...] | None:
    """Where --stages-at cuts, None where it is not given; BadInput where the blocks cannot be cut so."""
    if stages > len(blocks):
        raise BadInput(f"--stages {stages}: the model has {len(blocks)} blocks: give {len(blocks)} or fewer")
    if at is None:
        return None
    words = at.split(",")
    cuts = [int(word) for word in words if word.isascii() and word.isdecimal()]
    if len(words) != stages - 1 or cuts != sorted(set(cuts)) or len(cuts) != len(words) or not cuts[0] > 0:
        raise BadInput(
            f"--stages-at {at}: give {stages - 1} growing numbers from 1 to {len(blocks) - 1}, the first block of each "
            "stage but the first, as --stages prints them"
        )
    if cuts[-1] >= len(blocks):
        raise BadInput(f"--stages-at {at}: the model has blocks 0 to {len(blocks) - 1}: give no more")
    return tuple(cuts)


def measured_on_all(
    comm: Comm, model: nn.Module, blocks: Blocks, example: Inputs, *, device: torch.device, context: torch.autocast
) -> tuple[Passage, ...]:
    """What rank 0 has measured of one micro-batch, on all ranks."""
    measured = measure(model, blocks, example, device, context) if comm.rank == 0 else []
    found = [[one.time_ms, list(one.tail), str(one.dtype), str(one.memory_format)] for one in measured]
    return tuple(
        Passage(time_ms=time_ms, tail=tuple(tail), dtype=_DTYPES[dtype], memory_format=_FORMATS[memory_format])
        for time_ms, tail, dtype, memory_format in comm.allgather(found)[0]
    )


def part_on_all(
    comm: Comm,
    model: nn.Module,
    blocks: Blocks,
    passages: tuple[Passage, ...],
    *,
    cuts: Sequence[int] | None,
    pipeline: "Pipeline",
    recompute: bool,
) -> Part:
    """This rank's stage, cut at `cuts` or by time; the model keeps only what it needs."""
    stage, stages = comm.replica.rank, comm.replica.size
    if cuts is None:
        cuts = fastest([passage.time_ms for passage in passages], stages)
    part = Part(
        blocks=blocks, starts=(0, *cuts), passages=passages, stage=stage, pipeline=pipeline, recompute=recompute
    )
    keep_only(model, part.own)
    names = [name for name, _ in model.named_parameters()]
    others = [name for other, theirs in enumerate(comm.replica.allgather(names)) if other != stage for name in theirs]
    tied = tuple(name for name in names if name in others)
    assert not tied or stage in (0, stages - 1)
    return replace(part, tied=tied)
