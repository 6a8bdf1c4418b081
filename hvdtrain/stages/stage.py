"""One rank's stage of a model: its blocks and its input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.blocks import Block, Blocks, Inputs
from hvdtrain.core.parts import TensorsOf
from hvdtrain.loop.draft import Job
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput
from hvdtrain.stages.blocks import keep_blocks, run_all
from hvdtrain.stages.cut import Passage, choose_cuts, measure_blocks

if TYPE_CHECKING:
    from hvdtrain.stages.pipeline import Pipeline

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_FORMATS = {str(memory_format): memory_format for memory_format in (torch.contiguous_format, torch.channels_last)}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The blocks of this rank's stage in a running pipeline."""

    blocks: Blocks
    starts: tuple[int, ...]  # the first block of each stage
    passages: tuple[Passage, ...]  # of all blocks
    index: int  # of this stage
    tied: tuple[str, ...] = ()  # parameters that another stage also has
    pipeline: "Pipeline"
    recompute: bool = False  # activations inside blocks, in backward

    @property
    def local_blocks(self) -> tuple[Block, ...]:
        """This stage's blocks."""
        return blocks_of_stage(self.blocks, self.starts, self.index)

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.index == len(self.starts) - 1

    def run(self, model: nn.Module, received: Tensor | None, inputs: Inputs) -> Tensor:
        """Run this stage on one micro-batch; return the input of the next stage, or the model's outputs."""
        if received is not None:
            # Autocast caches the bf16 copy of a leaf: the gradients of its uses would then be summed in bf16.
            received = received.view_as(received)
        hidden = run_all(model, self.local_blocks, received, inputs, recompute=self.recompute)
        if self.is_last:
            return hidden
        return hidden.contiguous(memory_format=self.passages[self.starts[self.index + 1] - 1].memory_format)

    def make_buffer(self, inputs: Inputs, device: torch.device) -> Tensor:
        """Return an empty tensor for the output of the previous stage."""
        return self.passages[self.starts[self.index] - 1].make_buffer(inputs, self.blocks.batch_dims, device)

    def sum_tied(self, model: nn.Module, tensors_of: TensorsOf) -> None:
        """Sum tensors of parameters that two stages both hold; both get the same bits."""
        for values in (values for name in self.tied for values in tensors_of(model.get_parameter(name))):
            received = torch.empty_like(values)
            other = len(self.starts) - 1 - self.index  # of the first and the last stage
            for request in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, received, other)]
            ):
                request.wait()
            values.add_(received)

    def counted_before(self, model: nn.Module) -> set[int]:
        """Return the ids of parameters that an earlier stage counts."""
        return {id(model.get_parameter(name)) for name in self.tied} if self.index else set()

    def describe(self) -> str:
        """Describe for the user what each rank holds."""
        stages = []
        for index in range(len(self.starts)):
            blocks = blocks_of_stage(self.blocks, self.starts, index)
            first = self.starts[index]
            time_ms = sum(passage.time_ms for passage in self.passages[first : first + len(blocks)])
            stages.append(f"{blocks[0].name} to {blocks[-1].name} ({time_ms:.3g} ms)")
        cuts = ",".join(map(str, self.starts[1:]))
        return f"{len(stages)} stages: {', '.join(stages)}; the same again with --stages-at {cuts}"


def blocks_of_stage(blocks: Blocks, starts: Sequence[int], stage: int) -> tuple[Block, ...]:
    """Return the blocks of one stage."""
    return blocks.row[starts[stage] : (*starts, len(blocks))[stage + 1]]


def require_blocks(blocks: Blocks | None) -> Blocks:
    """Return the blocks; BadInput if the program does not say where its model may be cut."""
    if blocks is None:
        raise BadInput("--stages, --recompute: this program does not say where its model may be cut. Leave them out.")
    return blocks


def require_names(model: nn.Module, blocks: Blocks) -> None:
    """Raise BadInput if two blocks share a parameter under different names, which stages could not match."""
    names: dict[int, str] = {}
    for block in blocks.row:
        for module in block.modules:
            for name, parameter in model.get_submodule(module).named_parameters(module):
                first = names.setdefault(id(parameter), name)
                if first != name:
                    raise BadInput(f"--stages: {first} and {name} are one parameter in two blocks. Give each its own.")


def require_stages(blocks: Blocks, stages: int, at: str | None) -> tuple[int, ...] | None:
    """Return the cuts of --stages-at, None if it is not given; BadInput if the blocks cannot be cut like this."""
    if stages > len(blocks):
        raise BadInput(f"--stages {stages}: the model has {len(blocks)} blocks. Pass {len(blocks)} or fewer.")
    if at is None:
        return None
    fields = at.split(",")
    cuts = [int(field) for field in fields if field.isascii() and field.isdecimal()]
    if len(fields) != stages - 1 or cuts != sorted(set(cuts)) or len(cuts) != len(fields) or not cuts[0] > 0:
        raise BadInput(
            f"--stages-at {at}: not cuts between {stages} stages. Pass {stages - 1} growing numbers from 1 to "
            f"{len(blocks) - 1}, the first block of each stage but the first, as --stages prints them."
        )
    if cuts[-1] >= len(blocks):
        raise BadInput(f"--stages-at {at}: the model has blocks 0 to {len(blocks) - 1}. Pass no higher number.")
    return tuple(cuts)


def measure_on_all(
    comm: Comm,
    model: nn.Module,
    blocks: Blocks,
    example: Callable[[], Inputs],
    *,
    device: torch.device,
    context: torch.autocast,
) -> tuple[Passage, ...]:
    """Measure the blocks on rank 0 with one micro-batch, the `example`, and return the result on all ranks."""
    measured = measure_blocks(model, blocks, example(), device, context) if comm.rank == 0 else []
    facts = [
        [passage.time_ms, list(passage.trailing_shape), str(passage.dtype), str(passage.memory_format)]
        for passage in measured
    ]
    return tuple(
        Passage(
            time_ms=time_ms,
            trailing_shape=tuple(trailing_shape),
            dtype=_DTYPES[dtype],
            memory_format=_FORMATS[memory_format],
        )
        for time_ms, trailing_shape, dtype, memory_format in comm.allgather(facts)[0]
    )


def make_stage(
    job: Job,
    blocks: Blocks,
    passages: tuple[Passage, ...],
    *,
    cuts: Sequence[int] | None,
    pipeline: "Pipeline",
    recompute: bool,
) -> Stage:
    """Return this rank's stage, cut at `cuts` or by time; the model keeps only what it needs."""
    model, replica = job.model, job.comm.replica
    index, stages = replica.rank, replica.size
    if cuts is None:
        cuts = choose_cuts([passage.time_ms for passage in passages], stages)
    stage = Stage(
        blocks=blocks, starts=(0, *cuts), passages=passages, index=index, pipeline=pipeline, recompute=recompute
    )
    keep_blocks(model, stage.local_blocks)
    if job.give_values is not None:
        job.give_values(model)
        keep_blocks(model, stage.local_blocks)
    names = [name for name, _ in model.named_parameters()]
    names_by_stage = replica.allgather(names)
    others = {name for other, stage_names in enumerate(names_by_stage) if other != index for name in stage_names}
    tied = tuple(name for name in names if name in others)
    assert not tied or index in (0, stages - 1)
    return replace(stage, tied=tied)
