"""Micro-batches on their way through the stages of a replica, by the schedules of torch.distributed.pipelining."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.stages.settings import Order

Forward = Callable[[int, Tensor | None], Tensor]  # a micro-batch's number and what the stage before has sent
Loss = Callable[[int, Tensor], Tensor]  # its number and the last stage's output, to what is taken backward
MakeBuffer = Callable[[int], Tensor]  # its number, to an empty tensor for what comes


class _Numbered(nn.Module):
    """What torch calls: it cuts batches itself, so it is given the numbers of micro-batches that are cut already."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Forward

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        return self.run(int(number), received[0] if received else None)


class _Stage(PipelineStage):
    """Micro-batches of several shapes: torch's own has one for all of a schedule.

    Room for what comes is made when it is needed, and given back after the backward pass.
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
        """They have the shape that `make_buffer` says, and not that of the schedule."""


class _Eager1F1B(PipelineScheduleSingle):
    """1F1B whose stages are one more micro-batch ahead of the next one, so that none waits while a message travels.

    Of Zhuang et al., https://arxiv.org/abs/2211.05322. In torch's Schedule1F1B neighbours meet twice for each
    micro-batch, which takes as long as the slower of them, and the message on top.
    """

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])  # type: ignore[no-untyped-call]
        stage, count = self._stage, self._n_microbatches
        ahead = min(count, 2 * (self._num_stages - stage.stage_index) - 1)

        def receive(number: int) -> list[dist.P2POp]:
            return stage.get_fwd_recv_ops(number) if number < count else []

        def forward(number: int) -> list[dist.P2POp]:
            _wait_for_last(received[number])
            output = stage.forward_one_chunk(number, arg_mbs[number], kwarg_mbs[number], save_forward_output=False)
            self._maybe_compute_loss(stage, output, target_mbs, number)  # type: ignore[no-untyped-call]
            return stage.get_fwd_send_ops(number)

        received = [_begin(receive(0))]  # by micro-batch, for its forward pass
        sends: list[dist.P2POp] = []
        under_way: list[dist.Work] = []
        for number in range(ahead):
            under_way += _begin(sends)
            received.append(_begin(receive(number + 1)))
            sends = forward(number)
        for number in range(count):
            sent, under_way = under_way, _begin([*sends, *stage.get_bwd_recv_ops(number)])
            _wait_for_last(under_way)
            loss = self._maybe_get_loss(stage, number)  # type: ignore[no-untyped-call]
            stage.backward_one_chunk(number, loss=loss, last_backward=number == count - 1)
            received.append(_begin([*stage.get_bwd_send_ops(number), *receive(number + ahead + 1)]))
            sends = forward(number + ahead) if number + ahead < count else []
            for work in sent:  # a micro-batch ago: what was sent is given back
                work.wait()
            under_way += received[-1]
        for work in under_way:
            work.wait()
        self._update_losses(stage, losses)  # type: ignore[no-untyped-call]  # forgets those of this step


def _begin(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _wait_for_last(works: list[dist.Work]) -> None:
    """For what is received; NCCL has one `Work` for all of a batch."""
    for work in works[-1:]:
        work.wait()


class Pipeline:
    """One rank's stage; torch.distributed's world are the stages of its replica, in their order."""

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
        """Whether the loss is computed here."""
        return self.stage == self.stages - 1

    def train(self, count: int, *, forward: Forward, loss: Loss, make_buffer: MakeBuffer) -> None:
        """Take `count` micro-batches forward and backward; on the last stage `loss` follows each `forward`."""
        self._loss = loss
        self._run(count, forward, make_buffer, training=True)

    def evaluate(self, *, forward: Forward, make_buffer: MakeBuffer) -> None:
        """Take one micro-batch forward; the stages are at several ones at the same time, as they are called."""
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

        kind = _Eager1F1B if self._order == "1f1b" else ScheduleGPipe
        return stage, kind(stage, count, loss_fn=loss, scale_grads=False)
