"""Passes micro-batches through the stages of a replica, by the schedules of torch.distributed.pipelining."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hvdtrain.core.phases import OFF, Phases

Forward = Callable[[int, Tensor | None], Tensor]  # (number of a micro-batch, tensor from the previous stage) -> output
Loss = Callable[[int, Tensor], Tensor]  # (number, output of the last stage) -> tensor to run backward from
MakeBuffer = Callable[[int], Tensor]  # number -> empty tensor for what is received


class _Numbered(nn.Module):
    """The module that torch calls: torch splits batches itself, so it gets the numbers of existing micro-batches."""

    run: Forward

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        return self.run(int(number), received[0] if received else None)


class _Stage(PipelineStage):
    """Supports micro-batches of different shapes: torch's stage has one shape for a whole schedule.

    Receive buffers are allocated when needed, and freed after the backward pass.
    """

    make_buffer: MakeBuffer

    def __init__(self, module: nn.Module, stage: int, stages: int, device: torch.device, phases: Phases) -> None:
        unknown = torch.empty(0, device="meta", requires_grad=True)  # torch 2.14 receives no other gradient
        super().__init__(module, stage, stages, device, input_args=(unknown,) if stage else (), output_args=(unknown,))
        self._phases = phases

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = self.make_buffer(fwd_chunk_id).requires_grad_(self.has_backward)
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

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Skip torch's check: outputs have the shape of `make_buffer` and not that of the schedule."""

    _validate_stage_tensors: Any = _validate_fwd_outputs  # the check in torch 2.14, with TORCH_DISTRIBUTED_DEBUG=DETAIL

    def _warmup_forward_vote(self, *_: Any, **__: Any) -> Tensor:
        """Return torch 2.14's vote that all stages know their shapes, without messages between them."""
        return torch.ones(1)

    _warmup_backward_result = _warmup_forward_vote


class Pipeline:
    """One rank's stage; torch.distributed's world consists of the stages of its replica, in order."""

    def __init__(
        self, stage: int, stages: int, device: torch.device, *, order: str = "1f1b", phases: Phases = OFF
    ) -> None:
        self.stages = stages
        self._order, self._module = order, _Numbered()
        self._make_stage = partial(_Stage, self._module, stage, stages, device, phases)
        self._schedules: dict[tuple[int, bool], tuple[_Stage, PipelineScheduleSingle]] = {}
        self._loss: Loss

    def run(self, count: int, *, forward: Forward, make_buffer: MakeBuffer, loss: Loss | None = None) -> None:
        """Run `count` micro-batches forward, and backward if there is a `loss`, which follows the last stage's forward.

        With several calls without a loss, the stages work on different micro-batches concurrently.
        """
        kind = (count, loss is not None)
        if kind not in self._schedules:
            self._schedules[kind] = self._schedule(count, training=loss is not None)
        stage, schedule = self._schedules[kind]
        stage.make_buffer, self._module.run = make_buffer, forward
        numbers = torch.arange(count)
        if loss is not None:
            self._loss = loss
        schedule.step(number=numbers, target=None if loss is None else numbers, return_outputs=False)

    def _schedule(self, count: int, *, training: bool) -> tuple[_Stage, PipelineScheduleSingle]:
        stage = self._make_stage()
        if not training:
            return stage, ScheduleGPipe(stage, count)  # without a loss there is no backward pass

        def loss(output: Tensor, number: Tensor) -> Tensor:
            return self._loss(int(number), output)

        # 1F1B starts with one micro-batch per stage; with fewer micro-batches both orders are equal.
        kind = Schedule1F1B if self._order == "1f1b" and count >= self.stages else ScheduleGPipe
        return stage, kind(stage, count, loss_fn=loss, scale_grads=False)
