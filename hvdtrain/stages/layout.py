"""A replica as a sequence of blocks: how micro-batches pass through them, on one rank or on several."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hvdtrain.core.blocks import Blocks
from hvdtrain.core.layout import Called, Forward, Layout, Passes
from hvdtrain.core.parts import Part, TensorsOf
from hvdtrain.core.task import Batch, Sums
from hvdtrain.ranks.comm import Comm
from hvdtrain.stages.blocks import compile_blocks, run_all
from hvdtrain.stages.samples import Samples
from hvdtrain.stages.stage import Stage


class Recomputed(Layout):
    """A whole replica on each rank, with activations inside blocks recomputed in backward."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def call(self, model: nn.Module, *inputs: Tensor) -> Tensor:  # blocks have no names
        return run_all(model, self._blocks.row, None, inputs, recompute=True)

    def compile(self, models: Iterable[nn.Module]) -> None:
        super().compile(models)  # as a whole, for evaluation
        self._blocks = compile_blocks(self._blocks)


class StagePart(Part):
    """This rank's stage of a replica, and the bytes that it exchanges with others."""

    kind = "stage"

    def __init__(self, comm: Comm, stage: Stage, model: nn.Module) -> None:
        super().__init__(comm, stage.counted_before(model))
        self._stage = stage
        self.steps = self.handed_on_bytes = self._tied_bytes = 0

    def sum_tied(self, model: nn.Module, tensors_of: TensorsOf) -> None:
        def counted(parameter: nn.Parameter) -> Iterator[Tensor]:
            for values in tensors_of(parameter):
                self._tied_bytes += values.nbytes
                yield values

        self._stage.sum_tied(model, counted)

    def sent_bytes(self) -> tuple[dict[int, int], int]:
        exchanged, stage = Counter[int](), self._stage
        if not stage.is_last:  # each output sent forward has a gradient of the same size sent back
            exchanged[stage.index + 1] += self.handed_on_bytes
        if stage.index == 0:
            exchanged[len(stage.starts) - 1] += self._tied_bytes
        return {other: count // max(1, self.steps) for other, count in exchanged.items() if count}, 0

    def name_failure(self, source: str) -> str:
        return super().name_failure(source if self._stage.is_last else "forward pass")


class Stages(Layout):
    """A replica as a pipeline of stages."""

    def __init__(self, comm: Comm, stage: Stage, model: nn.Module) -> None:
        self.part: StagePart = StagePart(comm, stage, model)
        self._stage = stage
        self._samples = Samples(comm, stage)
        self.about: Mapping[str, Any] = {"stages_at": list(stage.starts[1:])}

    def compile(self, models: Iterable[nn.Module]) -> None:
        self._stage = replace(self._stage, blocks=compile_blocks(self._stage.blocks))

    def train(self, step: Forward, batches: Iterable[Batch], passes: Passes) -> None:
        stage, remaining, held = self._stage, iter(batches), dict[int, Batch]()

        def inputs(number: int) -> tuple[Tensor, ...]:
            if number not in held:
                step.phases.enter("bubble")
                held[number] = self._samples.of(step.task, lambda: next(remaining), step.device)
            return step.task.inputs(held[number])

        def forward(number: int, received: Tensor | None) -> Tensor:
            model_inputs = inputs(number)
            step.phases.enter("forward")
            with step.context(model_inputs[0]):
                outputs = stage.run(step.model, received, model_inputs)
            if not stage.is_last:
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
            return stage.make_buffer(model_inputs, step.device)

        self.part.steps += 1
        stage.pipeline.train(passes.count, forward=forward, loss=loss, make_buffer=make_buffer)
        self._samples.finish()

    def evaluate(self, step: Forward, model: nn.Module, read: Callable[[], Batch]) -> list[Sums]:
        stage, sums = self._stage, list[Sums]()
        batch = self._samples.of(step.task, read, step.device)
        inputs = step.task.inputs(batch)

        def forward(_: int, received: Tensor | None) -> Tensor:
            with step.context(None):
                outputs = stage.run(model, received, inputs)
                if stage.is_last:
                    sums.append(step.loss(Called(model, lambda *_: outputs), batch, training=False))
            return outputs

        stage.pipeline.evaluate(forward=forward, make_buffer=lambda _: stage.make_buffer(inputs, step.device))
        self._samples.finish()
        return sums

    def describe(self) -> str:
        return self._stage.describe()
