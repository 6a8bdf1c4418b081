"""One optimizer step: all ranks take it, or all ranks skip it.

The host queues work on the device without waiting for it, except for Horovod and for optimizers without a fused form in
torch (rmsprop, lars, lamb). The flag that says whether the sums were finite stays on the device, where the optimizer,
the running statistics and the moving average obey it. The host reads the result of a step later, with `Pending.read`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.finite import Skipped
from hvdtrain.core.pending import Pending
from hvdtrain.core.phases import OFF, Phase, Phases
from hvdtrain.core.slots import Follower, Outcome, Slots
from hvdtrain.core.task import Batch, Sums, Task, total
from hvdtrain.model import batch_norm
from hvdtrain.model.modes import TrainingModes
from hvdtrain.model.state import Places
from hvdtrain.ranks.comm import Members

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_context(device: torch.device, precision: str) -> torch.autocast:
    """Return an autocast context for bf16 or fp16; it does nothing for fp32."""
    return torch.autocast(device.type, _DTYPES[precision], enabled=precision != "fp32")


@dataclass(kw_only=True)
class Step:
    """Everything that a step uses; call it with this rank's part of a global batch.

    Order of a step: sum over ranks, unscale (fp16), check for NaN and Inf, clip by value, clip by norm, step or skip,
    update the loss scale.
    """

    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    slots: Slots
    scaler: GradScaler  # disabled unless fp16
    average: Follower | None = None  # follows the model after every step that is taken
    precision: str = "fp32"
    clip_value: float | None = None  # limit of each gradient element
    clip_norm: float | None = None  # limit of the norm of all gradients
    phases: Phases = OFF
    statistics: "Statistics" = field(init=False)
    modes: TrainingModes = field(init=False)

    def __post_init__(self) -> None:
        self.statistics, self.modes = Statistics(self.model), TrainingModes(self.model)
        self.scaler.scale(torch.zeros((), device=self.device))  # allocates its tensors; some ranks never compute a loss

    def __call__(
        self,
        micro_batches: Iterable[Batch],
        *,
        backward_passes: int,
        global_count: float,
        lr: float,
        measure: bool = False,
    ) -> Pending:
        """Take one step with the given learning rate, or skip it on all ranks.

        `micro_batches` yields `backward_passes` batches, prepared by the task; each may be empty. The loss is divided
        by `global_count`, the total weight of the samples of all ranks that step together in all passes, so that the
        summed gradients are those of the mean loss. `measure`: also compute the gradients' norm.
        """
        slots, self._measure, self._lr = self.slots, measure, lr
        self._before = self._latest = self.statistics.flat()
        self._sums, self._troubles = list[Sums](), list[Tensor]()
        for witness in slots.witnesses:
            witness.begin(self)
        self.optimizer.zero_grad(set_to_none=True)
        # Concurrent collectives of two NCCL libraries on one GPU (torch's inside the replica, Horovod's between
        # replicas) can deadlock: NVIDIA/nccl#195.
        shares_gpu = slots.where.ranks > 1 and self.device.type == "cuda"
        slots.how.overlap = not (self.phases.isolated or shares_gpu)
        slots.how.expect(backward_passes)
        with torch.autocast(self.device.type, enabled=False):  # around all passes: weights are cast only once
            slots.where.train(self, micro_batches, backward_passes, global_count)
        assert len(self._troubles) == backward_passes
        self.phases.enter("sync")
        slots.how.apply(self)
        names, totals = (
            total(self._sums) if self._sums else ([], torch.zeros(0, dtype=torch.float64, device=self.device))
        )
        outcome = Outcome(totals=totals, trouble=self._trouble, skip=self._not_finite, global_count=global_count)
        reason: Skipped | None = None
        for witness in slots.witnesses:  # before the loss scale changes: with half of it the gradients may be finite
            reason = witness.explain(self, outcome) or reason
        self.scaler.update()
        if self.average is not None:
            slots.when.follow(self.average, self._skip)
        for witness in slots.witnesses:
            witness.end(self)
        known = torch.stack([self._skip, self._not_finite, self._bad_here, self._trouble, self._grad_norm])
        values = torch.cat([totals, known.double()])
        return Pending(slots, self.group, names, values, reason=reason, refusals=self._refusals)

    # Called by slot `how`, in the order that it needs: ranks.sync.Update.

    def unscale(self) -> Tensor:
        """Unscale the summed gradients, and decide whether all ranks skip the step."""
        where = self.slots.where
        where.sum_tied(self.model, lambda parameter: [] if parameter.grad is None else [parameter.grad])
        self.phases.enter("optimizer")
        self.scaler.unscale_(self.optimizer)
        self._trouble = torch.stack(self._troubles).sum()
        self._not_finite, self._bad_here = where.decide_skip(self.gradients(), self._trouble, self.group)
        if self.scaler.is_enabled():  # Inf in other parts of the replica must lower the loss scale on this rank, too
            for found_inf in self.scaler._found_inf_per_device(self.optimizer).values():
                found_inf.copy_(self._not_finite)
        refusals = [witness.refuse(self) for witness in self.slots.witnesses]
        self._refusals = [refusal for refusal in refusals if refusal is not None]
        self._skip = self._not_finite
        for refusal in self._refusals:
            self._skip = torch.maximum(self._skip, refusal.skip)
        self._grad_norm = self._norm() if self._measure else torch.full_like(self._skip, torch.nan)
        self.statistics.set(torch.where(self._skip == 0, self._latest, self._before))
        return self._skip

    def clip(self) -> None:
        """Clip the gradients by value, then by norm."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, self._norm())

    def step(self) -> None:
        """Step the optimizer, unless the step is skipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * group.get("share_of_lr", 1.0)  # of a program's own optimizer
        # torch's fused optimizers read the flag on the device; for the others the host has to wait for it.
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.grad_scale, self.optimizer.found_inf = None, self._skip  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not self._skip.item():
            self.optimizer.step()

    # Called by slot `where`: slots.Passes.

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return self.task.inputs(batch)

    @contextmanager
    def context(self, samples: Tensor | None) -> Iterator[None]:
        frozen: AbstractContextManager[None] = nullcontext()
        if samples is not None and len(samples) < 2:
            frozen = batch_norm.frozen(self.model, len(samples))
        with precision_context(self.device, self.precision), frozen:
            yield

    def loss(self, forward: Callable[..., Any], batch: Batch, *, training: bool) -> Sums:
        sums = self.task.loss(forward, batch, training=training)
        return replace(sums, loss=self._witnessed(sums.loss)) if training else sums

    def record_loss(self, sums: Sums, global_count: float) -> Tensor:
        self._record(sums.loss.detach())
        self._sums.append(replace(sums, loss=sums.loss.detach()))
        scaled: Tensor = self.scaler.scale(sums.loss / (global_count + self._troubles[-1]))
        return scaled

    def hand_on(self, outputs: Tensor) -> Tensor:
        outputs = self._witnessed(outputs)
        self._record(outputs.detach().sum(dtype=torch.float64))
        return outputs

    def begin_last_pass(self, batch: Batch) -> None:
        for witness in self.slots.witnesses:
            witness.begin_last_pass(self, batch)

    def enter(self, phase: Phase) -> None:
        self.phases.enter(phase)

    def evaluation(self, model: nn.Module, read: Callable[[], Batch]) -> list[Sums]:
        """Evaluate the batch that `read` prepares; return its sums, or nothing if another rank computes them."""
        return self.slots.where.evaluate(self, model, read)

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate: the moving average of the weights if there is one, else the model itself."""
        return self.model if self.average is None else self.average.model()

    @property
    def group(self) -> Members:
        """The ranks whose gradients are summed: they take or skip a step together."""
        return self.slots.when.step_group(self.slots.comm)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    def gradients(self) -> list[Tensor]:
        """Return all gradients that are not None."""
        return [one.grad for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]

    def _norm(self) -> Tensor:
        return self.slots.where.norm([group["params"] for group in self.optimizer.param_groups])

    def _witnessed(self, values: Tensor) -> Tensor:
        for witness in self.slots.witnesses:
            values = witness.pass_on(values)
        return values

    def _record(self, value: Tensor) -> None:
        """Record 0 for the output of a forward pass, or NaN if it or the running statistics are not finite.

        A non-finite output does not always lead to non-finite gradients. The recorded NaN enters the sum, so that other
        ranks skip the step, too.
        """
        self._latest = self.statistics.flat()
        self._troubles.append(0 * (value + self._latest.sum()))


class Statistics:
    """The running statistics of batch and instance normalisation as one vector."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = Places(model, batch_norm.running_statistics(model))
        self._device = next(model.parameters()).device

    def flat(self) -> Tensor:
        """Return a copy of all statistics, concatenated."""
        buffers = self._buffers()
        return torch.cat(buffers) if buffers else torch.zeros(0, device=self._device)

    def set(self, flat: Tensor) -> None:
        """Restore the statistics from such a copy."""
        if buffers := self._buffers():
            torch._foreach_copy_(buffers, flat.split([len(one) for one in buffers]))
