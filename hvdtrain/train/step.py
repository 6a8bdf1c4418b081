"""One optimizer step on all ranks: right, or skipped by all of them together."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.timing.phases import OFF, Phases
from hvdtrain.train import batch_norm
from hvdtrain.train.finite import SUM, Skipped, all_finite, total_norm
from hvdtrain.train.task import Batch, Sums, Task, Totals, total

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_context(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to bf16 or fp16; nothing for fp32."""
    return torch.autocast(device.type, _DTYPES[precision], enabled=precision != "fp32")


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """This rank's part of a step."""

    totals: Totals  # sums over its samples; 'loss' is not finite where the rank's forward pass failed
    skipped: Skipped | None  # the same on all ranks
    grad_norm: float = math.nan  # 2-norm of the summed gradients before clipping; NaN where it was not measured


@dataclass(frozen=True, kw_only=True)
class _LastPass:
    """What tells whether this rank's own gradients were finite, once the sum over ranks has taken their place."""

    batch: Batch
    random: list[Tensor]  # the generators' states before it
    finite_before: Tensor  # whether the gradients of the passes before it were


@dataclass(kw_only=True)
class TrainingStep:
    """What every step uses; call it with this rank's part of a global batch.

    The order is: sum over ranks, unscale (fp16), finite or not, clip by value, clip by norm, step or skip, loss scale.
    """

    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    comm: Comm
    sync: GradientSync
    scaler: GradScaler  # disabled unless fp16
    average: AveragedModel | None = None  # follows the model after every step that is taken
    precision: str
    clip_value: float | None = None  # per gradient element
    clip_norm: float | None = None  # of all gradients together
    phases: Phases = OFF
    _statistics: list[Tensor] = field(init=False)  # batch norm's running ones
    _before: list[Tensor] = field(init=False)  # the same before the step

    def __post_init__(self) -> None:
        self._statistics = batch_norm.running_statistics(self.model)
        self._before = [buffer.clone() for buffer in self._statistics]

    @property
    def evaluated(self) -> nn.Module:
        """The moving average of the weights if there is one, else the model itself."""
        return self.model if self.average is None else self.average.module

    @property
    def device(self) -> torch.device:
        """The model's."""
        return next(self.model.parameters()).device

    def __call__(
        self,
        micro_batches: Iterable[Batch],
        *,
        backward_passes: int,
        global_count: float,
        lr: float,
        measure: bool = False,
    ) -> StepDone:
        """Take one step with the given learning rate, or skip it on all ranks.

        `micro_batches` yields `backward_passes` batches, prepared by the task; each may be empty. The loss is divided
        by `global_count`, what the samples of all ranks and passes weigh together, so that the summed gradients are
        those of the mean loss. `measure` asks for the gradients' norm.
        """
        if self._statistics:
            torch._foreach_copy_(self._before, self._statistics)
        last_pass = None
        finite_forward: list[Tensor] = []
        done: list[Sums] = []
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.expect(backward_passes)
        for number, batch in enumerate(micro_batches, start=1):
            if number == backward_passes:
                finite_before = torch.isfinite(nn.utils.get_total_norm(self._gradients(), norm_type=torch.inf))
                last_pass = _LastPass(batch=batch, random=_random_state(), finite_before=finite_before)
            self.phases.enter("forward")
            sums = self._loss(batch)
            self.phases.enter("backward")
            # A loss or a running statistic that is not finite does not always have such gradients: this makes sure of
            # it, so that the other ranks hear of it with the sum.
            finite_forward.append(torch.isfinite(sums.loss.detach()) & self._statistics_are_finite(sums.loss.device))
            factor = torch.where(finite_forward[-1], 1.0, torch.nan)
            self.scaler.scale(sums.loss * factor / global_count).backward()
            done.append(replace(sums, loss=sums.loss.detach()))
        assert len(done) == backward_passes
        assert last_pass is not None
        self.phases.enter("sync")
        self.sync.finish()
        self.phases.enter("optimizer")
        self.scaler.unscale_(self.optimizer)
        names, values = total(done)
        totals = dict(zip(names, values.tolist(), strict=True))
        gradients = self._gradients()
        # Every rank of the data group has the same summed gradients, and NaN and infinity survive a sum, so its ranks
        # decide alike without asking each other. That would not hold for Adasum (it divides by norms), inside process
        # sets (their sums differ), or for sparse gradients (gathered, not summed). Reading the answer costs little:
        # Horovod has waited for the device already.
        finite = all_finite(gradients, self.comm.stages)
        grad_norm = total_norm(gradients, self.comm.stages).item() if measure else math.nan
        skipped = None
        if finite:
            self._clip_and_step(gradients, lr)
        else:
            forward = None
            if not bool(torch.stack(finite_forward).all()):
                forward = "batch norm" if math.isfinite(totals["loss"]) else "loss"
            skipped = self._find_source(last_pass, forward, global_count)
        self.scaler.update()
        in_sum_alone = skipped is not None and skipped.source == SUM
        self.sync.update(overflowed=in_sum_alone and not self.scaler.is_enabled())  # a scaled loss answers for it: Wire
        if finite and self.average is not None:
            self.average.update_parameters(self.model)
        return StepDone(totals=totals, skipped=skipped, grad_norm=grad_norm)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _loss(self, batch: Batch) -> Sums:
        few = len(next(iter(batch.values()))) < 2
        frozen: AbstractContextManager[None] = batch_norm.frozen(self.model) if few else nullcontext()
        with precision_context(self.device, self.precision), frozen:
            return self.task.loss(self._forward, batch, training=True)

    def _forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        outputs = self.model(*inputs, **named_inputs)
        self.phases.enter("loss")
        return outputs

    def _clip_and_step(self, gradients: list[Tensor], lr: float) -> None:
        parameters = self._parameters()
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, total_norm(gradients, self.comm.stages))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)

    def _find_source(self, last_pass: _LastPass, forward: str | None, global_count: float) -> Skipped:
        """The first rank whose forward pass, or else whose gradients, were not finite. All ranks call this together.

        `forward` is what was not finite in this rank's. Batch norm over all ranks spreads one rank's trouble in the
        forward pass to all of them: then rank 0 stands for all.
        """
        self.phases.enter("other")
        self._restore_statistics()
        for rank, source in enumerate(self.comm.allgather(forward)):
            if source is not None:
                return Skipped(rank=rank, source=source)
        # Once more without Horovod: autograd.grad does not reach the hooks that communicate.
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        _restore_random_state(last_pass.random)
        scaled = self.scaler.scale(self._loss(last_pass.batch).loss / global_count)
        self.phases.enter("other")
        gradients = torch.autograd.grad(scaled, trainable, allow_unused=True)
        bad_here = not all(bool(torch.isfinite(own).all()) for own in gradients if own is not None)
        bad_here |= not last_pass.finite_before
        self._restore_statistics()
        bad_gradients = self.comm.allgather(bad_here)
        if not any(bad_gradients):
            return Skipped(rank=0, source=SUM)
        return Skipped(rank=bad_gradients.index(True), source="gradients")

    def _statistics_are_finite(self, device: torch.device) -> Tensor:
        if not self._statistics:
            return torch.ones((), dtype=torch.bool, device=device)
        return torch.isfinite(nn.utils.get_total_norm(self._statistics, norm_type=torch.inf))

    def _restore_statistics(self) -> None:
        if self._statistics:
            torch._foreach_copy_(self._statistics, self._before)


def _random_state() -> list[Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def _restore_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
