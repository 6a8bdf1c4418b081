"""One optimizer step: all ranks take it, or all ranks skip it.

The host queues work on the device without waiting for it, except for Horovod and for optimizers without a fused form in
torch (rmsprop, lars, lamb). The flag that says whether the sums were finite stays on the device, where the optimizer,
the running statistics and the moving average read it. The host reads the result of a step later, with `Pending.read`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.every_step import EveryStep, Follower
from hvdtrain.core.finite import Refusal, Skipped, total_norm
from hvdtrain.core.layout import Layout, Passes, Statistics
from hvdtrain.core.model import batch_norm
from hvdtrain.core.model.modes import TrainingModes
from hvdtrain.core.pending import Outcome, Pending
from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.task import Batch, Sums, Task, total
from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.ranks.sync import GradientSync

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_context(device: torch.device, precision: str) -> torch.autocast:
    """Return an autocast context for bf16 or fp16; it does nothing for fp32 and tf32."""
    return torch.autocast(device.type, _HALVES.get(precision), enabled=precision in _HALVES)


class Witness:
    """Watches steps from inside; by default every method does nothing."""

    name = ""  # of its state in a checkpoint; empty if it has none to keep
    is_own = False  # the state differs between ranks; a run that resumes with another number of ranks has none

    def begin(self, step: "Step") -> None:
        """Called before the step changes anything."""

    def begin_last_pass(self, step: "Step", batch: Batch) -> None:
        """Called before the last micro-batch that this rank reads."""

    def pass_on(self, values: Tensor) -> Tensor:
        """Return the output of a forward pass (the loss, or what a part passes on), or a replacement for it."""
        return values

    def see(self, sums: Sums) -> None:
        """Called with the sums of each forward pass that ends in a loss, as all witnesses have passed them on."""

    def refuse(self, step: "Step") -> Refusal | None:
        """Decide on the device whether to skip the step; gradients are summed and unscaled, but not clipped."""

    def explain(self, step: "Step", outcome: Outcome) -> Skipped | None:
        """Return why the step was skipped, if this witness knows; called by all ranks that step together."""

    def end(self, step: "Step") -> None:
        """Called after the step was taken or skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, texts and lists for a checkpoint, equal on all ranks that step together unless `is_own`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""


@dataclass(kw_only=True, repr=False)
class Slots:
    """The slots of a step, which features fill: no slot knows another, and each has a default that costs nothing."""

    comm: Comm  # the ranks
    how: GradientSync  # sums gradients over ranks
    where: Layout = field(default_factory=Layout)  # places a replica on ranks
    when: EveryStep = field(default_factory=EveryStep)  # makes replicas equal
    witnesses: list[Witness] = field(default_factory=list)  # called in this order


@dataclass(kw_only=True, repr=False)
class Step:
    """Everything that a step uses; call it with this rank's part of a global batch."""

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
    statistics: Statistics = field(init=False)
    modes: TrainingModes = field(init=False)
    _named: set[str] = field(init=False)  # the buffers that the task averages besides running statistics

    def __post_init__(self) -> None:
        self.statistics, self.modes = Statistics(self.model), TrainingModes(self.model)
        self._named = set(self.task.averaged_buffers(self.model)).difference(batch_norm.running_statistics(self.model))
        self.scaler.scale(torch.zeros((), device=self.device))  # allocates its tensors; some ranks never compute a loss

    def __repr__(self) -> str:
        return f"Step({type(self.model).__name__}, {type(self.optimizer).__name__}, {self.precision})"

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
        slots, how, part = self.slots, self.slots.how, self.slots.where.part
        before, kept = self.statistics.flat(), {name: one.clone() for name, one in self._averaged().items()}
        for witness in slots.witnesses:
            witness.begin(self)
        self.optimizer.zero_grad(set_to_none=True)
        how.overlap = self._may_overlap
        how.expect(backward_passes)
        passes = Passes(
            count=backward_passes, global_count=global_count, scale=self.scaler.scale, statistics=self.statistics
        )
        with torch.autocast(self.device.type, enabled=False):  # around all passes: weights are cast only once
            slots.where.train(self, self._announce_last(micro_batches, backward_passes), passes)
        assert len(passes.troubles) == backward_passes
        self.phases.enter("sync")
        how.finish()
        part.sum_tied(self.model, lambda parameter: [] if parameter.grad is None else [parameter.grad])
        self.phases.enter("optimizer")
        self.scaler.unscale_(self.optimizer)
        outcome = self._decide(passes)
        how.decided(outcome.skip)
        grad_norm = self._norm() if measure else torch.full_like(outcome.skip, torch.nan)
        self.statistics.set(torch.where(outcome.skip == 0, passes.latest, before))
        self._take_back(kept, outcome.skip)
        self._clip()
        self._step_unless(outcome.skip, lr)
        reason = None
        for witness in slots.witnesses:  # before the loss scale changes: with half of it the gradients may be finite
            reason = witness.explain(self, outcome) or reason
        self.scaler.update()
        if self.average is not None:
            slots.when.follow(self.average, outcome.skip)
        for witness in slots.witnesses:
            witness.end(self)
        return Pending(outcome, grad_norm, comm=slots.comm, group=self.group, part=part, how=how, reason=reason)

    def _averaged(self) -> dict[str, Tensor]:
        buffers = self.model.named_buffers() if self._named else ()
        return {name: buffer.detach() for name, buffer in buffers if name in self._named}

    def _take_back(self, kept: Mapping[str, Tensor], skip: Tensor) -> None:
        for name, now in self._averaged().items():
            if name in kept and kept[name].shape == now.shape:
                now.copy_(torch.where(skip == 0, now, kept[name]))

    @property
    def _may_overlap(self) -> bool:
        """Whether gradients may be summed during backward.

        Concurrent collectives of two NCCL libraries on one GPU (torch's inside the replica, Horovod's between replicas)
        can deadlock: NVIDIA/nccl#195.
        """
        shares_gpu = self.slots.comm.replica.size > 1 and self.device.type == "cuda"
        return not (self.phases.isolated or shares_gpu)

    def _announce_last(self, micro_batches: Iterable[Batch], count: int) -> Iterator[Batch]:
        """Yield the micro-batches; the witnesses see the last one before its passes."""
        for number, batch in enumerate(micro_batches, start=1):
            if number == count:
                for witness in self.slots.witnesses:
                    witness.begin_last_pass(self, batch)
            yield batch

    def _decide(self, passes: Passes) -> Outcome:
        """Decide on the device whether all ranks that step together take the step or skip it."""
        trouble = torch.stack(passes.troubles).sum()
        not_finite, bad_here = self.slots.where.part.decide_skip(self.gradients(), trouble, self.group)
        if self.scaler.is_enabled():  # Inf in other parts of the replica must lower the loss scale on this rank, too
            for found_inf in self.scaler._found_inf_per_device(self.optimizer).values():
                found_inf.copy_(not_finite)
        refusals = [witness.refuse(self) for witness in self.slots.witnesses]
        made = [refusal for refusal in refusals if refusal is not None]
        skip = not_finite
        for refusal in made:
            skip = torch.maximum(skip, refusal.skip)
        names, totals = total(passes.sums) if passes.sums else ([], trouble.new_zeros(0, dtype=torch.float64))
        return Outcome(
            names=names,
            totals=totals,
            global_count=passes.global_count,
            trouble=trouble,
            not_finite=not_finite,
            bad_here=bad_here,
            refusals=made,
            skip=skip,
        )

    def _clip(self) -> None:
        """Clip the gradients by value, then by norm."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, self._norm())

    def _step_unless(self, skip: Tensor, lr: float) -> None:
        """Step the optimizer with this learning rate, unless the step is skipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("share_of_lr", 1.0)  # of a program's own optimizer
        # torch's fused optimizers read the flag on the device; for the others the host has to wait for it.
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.grad_scale, self.optimizer.found_inf = None, skip  # type: ignore[attr-defined]
            self.slots.how.update(self.optimizer)
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not skip.item():
            self.slots.how.update(self.optimizer)

    @contextmanager
    def context(self, samples: Tensor | None) -> Iterator[None]:
        """Enter the run's precision, see layout.Forward."""
        frozen: AbstractContextManager[None] = nullcontext()
        if samples is not None and len(samples) < 2:
            frozen = batch_norm.frozen(self.model, len(samples))
        with precision_context(self.device, self.precision), frozen:
            yield

    def loss(self, model: Callable[..., Any], batch: Batch, *, training: bool) -> Sums:
        """Return the task's sums over a batch; in training the witnesses see them."""
        sums = self.task.loss(model, batch, training=training)
        if training:
            sums = replace(sums, loss=self.pass_on(sums.loss))
            for witness in self.slots.witnesses:
                witness.see(sums)
        return sums

    def pass_on(self, outputs: Tensor) -> Tensor:
        """Return the output of a forward pass, or what the witnesses replace it with."""
        for witness in self.slots.witnesses:
            outputs = witness.pass_on(outputs)
        return outputs

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
        """Return the 2-norm of all gradients of a replica."""
        before = self.slots.where.part.counted_before
        counted = [
            [one.grad for one in group["params"] if one.grad is not None and id(one) not in before]
            for group in self.optimizer.param_groups
        ]
        return self.slots.how.whole_norm(total_norm(counted, self.slots.comm.replica))
