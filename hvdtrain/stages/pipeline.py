"""Passes micro-batches through the stages of a replica, by the schedules of torch.distributed.pipelining."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.stages.settings import Order

Forward = Callable[[int, Tensor | None], Tensor]  # (number of a micro-batch, tensor from the previous stage) -> output
Loss = Callable[[int, Tensor], Tensor]  # (number, output of the last stage) -> tensor to run backward from
MakeBuffer = Callable[[int], Tensor]  # number -> empty tensor for what is received


class _Numbered(nn.Module):
    """The module that torch calls: torch splits batches itself, so it gets the numbers of existing micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Forward

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        return self.run(int(number), received[0] if received else None)


class _Stage(PipelineStage):
    """Supports micro-batches of different shapes: torch's stage has one shape for a whole schedule.

    Receive buffers are allocated when needed, and freed after the backward pass.
    """

    make_buffer: MakeBuffer

    def __init__(self, module: nn.Module, stage: int, stages: int, device: torch.device, phases: Phases) -> None:
        unknown = torch.empty(0, device="meta")
        super().__init__(module, stage, stages, device, input_args=(unknown,) if stage else (), output_args=(unknown,))
        self._phases = phases

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = self.make_buffer(fwd_chunk_id).requires_grad_(self.has_backward)  # type: ignore[union-attr]
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            [output], _ = self.fwd_cache[bwd_chunk_id]
            self.grad_recv_info[bwd_chunk_id][0].buffer = torch.empty_like(output)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        if not self.has_backward:
            return
        self._phases.enter("backward")
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = torch.empty(0)
        self._phases.enter("bubble")

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Skip torch's check: outputs have the shape of `make_buffer` and not that of the schedule."""


class Pipeline:
    """One rank's stage; torch.distributed's world consists of the stages of its replica, in order."""

    def __init__(
        self, stage: int, stages: int, device: torch.device, *, order: Order = "1f1b", phases: Phases = OFF
    ) -> None:
        self.stage, self.stages = stage, stages
        self._device, self._order, self._phases = device, order, phases
        self._module = _Numbered()
        self._schedules: dict[tuple[int, bool], tuple[_Stage, PipelineScheduleSingle]] = {}
        self._loss: Loss

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.stages - 1

    def train(self, count: int, *, forward: Forward, loss: Loss, make_buffer: MakeBuffer) -> None:
        """Run `count` micro-batches forward and backward; on the last stage `loss` follows each `forward`."""
        self._loss = loss
        self._run(count, forward, make_buffer, training=True)

    def evaluate(self, *, forward: Forward, make_buffer: MakeBuffer) -> None:
        """Run one micro-batch forward; with several calls, the stages work on different micro-batches concurrently."""
        self._run(1, forward, make_buffer, training=False)

    def _run(self, count: int, forward: Forward, make_buffer: MakeBuffer, *, training: bool) -> None:
        if (count, training) not in self._schedules:
            self._schedules[count, training] = self._schedule(count, training=training)
        stage, schedule = self._schedules[count, training]
        stage.make_buffer = make_buffer
        self._module.run = forward
        numbers = torch.arange(count)
        schedule.step(number=numbers, target=numbers if training else None, return_outputs=False)

    def _schedule(self, count: int, *, training: bool) -> tuple[_Stage, PipelineScheduleSingle]:
        stage = _Stage(self._module, self.stage, self.stages, self._device, self._phases)
        if not training:
            return stage, ScheduleGPipe(stage, count)  # without a loss there is no backward pass

        def loss(output: Tensor, number: Tensor) -> Tensor:
            return self._loss(int(number), output)

        # 1F1B starts with one micro-batch per stage; with fewer micro-batches both orders are equal.
        kind = Schedule1F1B if self._order == "1f1b" and count >= self.stages else ScheduleGPipe
        return stage, kind(stage, count, loss_fn=loss, scale_grads=False)
