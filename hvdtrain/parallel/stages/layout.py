"""A replica as a sequence of blocks: how micro-batches pass through them, on one rank or on several."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.blocks import Block, Blocks, Inputs
from hvdtrain.core.layout import Called, Forward, Layout, Passes
from hvdtrain.core.parts import Part, TensorsOf
from hvdtrain.core.replica.point_to_point import join_replica_on_all
from hvdtrain.core.task import Batch, Sums
from hvdtrain.loop.draft import Job
from hvdtrain.parallel.stages.blocks import compile_blocks, keep_blocks, run_all
from hvdtrain.parallel.stages.cut import Passage, choose_cuts, measure_on_all, require_blocks, require_parameters
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from hvdtrain.parallel.stages.pipeline import Pipeline  # takes a second to import


class Recomputed(Layout):
    """A whole replica on each rank, with activations inside blocks recomputed in backward."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks.row

    def call(self, model: nn.Module, *inputs: Tensor) -> Tensor:  # blocks have no names
        return run_all(model, self._blocks, None, inputs, recompute=True)

    def compile(self, models: Iterable[nn.Module]) -> None:
        super().compile(models)  # as a whole, for evaluation
        self._blocks = compile_blocks(self._blocks)


class StagePart(Part):
    """This rank's stage of a replica, and the bytes that it exchanges with others."""

    kind = "stage"

    def __init__(self, comm: Comm, model: nn.Module) -> None:
        """Find the parameters of the model's part that other stages hold, too; a collective of the replica."""
        self._stage, self._last = comm.replica.rank, comm.replica.size - 1
        self.is_last = self._stage == self._last  # and computes the loss
        names = [name for name, _ in model.named_parameters()]
        held = enumerate(comm.replica.allgather(names))
        others = {name for stage, held_there in held if stage != self._stage for name in held_there}
        self.tied = [name for name in names if name in others]  # of the first and the last stage
        assert not self.tied or self._stage in (0, self._last)
        super().__init__(comm, {id(model.get_parameter(name)) for name in self.tied} if self._stage else set())
        self.steps = self.handed_on_bytes = self._tied_bytes = 0

    def sum_tied(self, model: nn.Module, tensors_of: TensorsOf) -> None:
        for values in (values for name in self.tied for values in tensors_of(model.get_parameter(name))):
            self._tied_bytes += values.nbytes
            received, other = torch.empty_like(values), self._last - self._stage  # of the first and the last stage
            exchange = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, received, other)]
            for request in dist.batch_isend_irecv(exchange):
                request.wait()
            values.add_(received)

    def sent_bytes(self) -> tuple[dict[int, int], int]:
        exchanged = Counter[int]()
        if not self.is_last:  # each output sent forward has a gradient of the same size sent back
            exchanged[self._stage + 1] += self.handed_on_bytes
        if self._stage == 0:
            exchanged[self._last] += self._tied_bytes
        return {other: count // max(1, self.steps) for other, count in exchanged.items() if count}, 0

    def name_failure(self, source: str) -> str:
        return super().name_failure(source if self.is_last else "forward pass")


class Stages(Layout):
    """A replica as a pipeline of stages, each with a few blocks of the model."""

    def __init__(
        self, job: Job, cuts: Sequence[int], passages: Sequence[Passage], pipeline: "Pipeline", *, recompute: bool
    ) -> None:
        """Keep in the model only what this stage needs; a collective of the replica.

        `cuts` are the first blocks of the stages after the first, `passages` what was measured of all blocks. With
        `recompute`, backward computes the activations inside blocks again.
        """
        self._stage, self._starts = job.comm.replica.rank, [0, *cuts]
        self._all_blocks = require_blocks(job.cuts.blocks)
        self._passages, self._pipeline, self._recompute = passages, pipeline, recompute
        self._blocks = self._blocks_of(self._stage)
        keep_blocks(job.model, self._blocks)
        self.part: StagePart = StagePart(job.comm, job.model)
        self.metadata: Mapping[str, Any] = {"stages_at": list(cuts)}

    def _blocks_of(self, stage: int) -> tuple[Block, ...]:
        return self._all_blocks.row[self._starts[stage] : [*self._starts, len(self._all_blocks)][stage + 1]]

    def compile(self, models: Iterable[nn.Module]) -> None:
        self._blocks = compile_blocks(self._blocks)

    def _run(self, model: nn.Module, received: Tensor | None, inputs: Inputs) -> Tensor:
        """Run this stage on one micro-batch; return the input of the next stage, or the model's outputs."""
        if received is not None:
            # Autocast caches the bf16 copy of a leaf: the gradients of its uses would then be summed in bf16.
            received = received.view_as(received)
        hidden = run_all(model, self._blocks, received, inputs, recompute=self._recompute)
        if self.part.is_last:
            return hidden
        passage = self._passages[self._starts[self._stage + 1] - 1]
        shape = list(hidden.shape[self._all_blocks.batch_dims :])
        if shape != passage.trailing_shape:  # the next stage has made room for it
            raise BadInput(
                f"--stages: an output of {self._blocks[-1].name} has shape {shape} for this batch, and "
                f"{passage.trailing_shape} for the first. Give all samples one shape, or leave --stages out."
            )
        return passage.in_format(hidden)

    def _make_buffer(self, inputs: Inputs) -> Tensor:
        """Return an empty tensor for the output of the previous stage."""
        batch_dims = self._all_blocks.batch_dims
        return self._passages[self._starts[self._stage] - 1].make_buffer(inputs, batch_dims, inputs[0].device)

    def train(self, step: Forward, batches: Iterable[Batch], passes: Passes) -> None:
        remaining, held = iter(batches), dict[int, Batch]()

        def inputs(number: int) -> tuple[Tensor, ...]:
            if number not in held:
                step.phases.enter("bubble")
                held[number] = next(remaining)
            return step.task.inputs(held[number])

        def forward(number: int, received: Tensor | None) -> Tensor:
            model_inputs = inputs(number)
            step.phases.enter("forward")
            with step.context(model_inputs[0]):
                outputs = self._run(step.model, received, model_inputs)
            if not self.part.is_last:
                outputs = step.pass_on(outputs)
                passes.add_outputs(outputs)
                self.part.handed_on_bytes += outputs.nbytes
                del held[number]
            step.phases.enter("bubble")
            return outputs

        def loss(number: int, outputs: Tensor) -> Tensor:
            step.phases.enter("loss")
            with step.context(None):
                sums = step.loss(Called(step.model, lambda *_: outputs), held.pop(number), training=True)
            return passes.add(sums)

        def make_buffer(number: int) -> Tensor:
            model_inputs = inputs(number)
            step.phases.enter("bubble")
            return self._make_buffer(model_inputs)

        self.part.steps += 1
        self._pipeline.run(passes.count, forward=forward, make_buffer=make_buffer, loss=loss)

    def evaluate(self, step: Forward, model: nn.Module, read: Callable[[], Batch]) -> list[Sums]:
        sums, batch = list[Sums](), read()
        inputs = step.task.inputs(batch)

        def forward(_: int, received: Tensor | None) -> Tensor:
            with step.context(None):
                outputs = self._run(model, received, inputs)
                if self.part.is_last:
                    sums.append(step.loss(Called(model, lambda *_: outputs), batch, training=False))
            return outputs

        self._pipeline.run(1, forward=forward, make_buffer=lambda _: self._make_buffer(inputs))
        return sums

    def describe(self) -> str:
        stages = []
        for stage, first in enumerate(self._starts):
            blocks = self._blocks_of(stage)
            time_ms = sum(passage.time_ms for passage in self._passages[first : first + len(blocks)])
            stages.append(f"{blocks[0].name} to {blocks[-1].name} ({time_ms:.3g} ms)")
        starts = ",".join(map(str, self._starts))
        return f"{len(stages)} stages: {', '.join(stages)}; the same again with --stages {starts}"


def make_stages(job: Job, *, cuts: Sequence[int] | None, order: str, recompute: bool) -> Layout:
    """Return this rank's stage, cut at `cuts`, else as in the checkpoint, else by time; the model keeps only that part.

    Raises BadInput if a stage of the first replica does not see the run folder.
    """
    from hvdtrain.parallel.stages.pipeline import Pipeline

    replica, recorded = job.comm.replica, job.resumed.get("stages_at", ())
    join_replica_on_all(job.comm, job.device, f"--stages {replica.size}", is_shared=job.is_shared)
    passages = measure_on_all(job)
    if cuts is None:
        is_cut_alike = len(recorded) == replica.size - 1
        cuts = recorded if is_cut_alike else choose_cuts([passage.time_ms for passage in passages], replica.size)
    require_parameters(job.model, require_blocks(job.cuts.blocks), cuts)
    pipeline = Pipeline(replica.rank, replica.size, job.device, order=order, phases=job.phases)
    return Stages(job, cuts, passages, pipeline, recompute=recompute)
