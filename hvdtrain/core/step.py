"""One optimizer step on all ranks: right, or skipped by all of them together.

The host starts work on the device and does not wait for it, but for what Horovod waits for and for optimizers that
torch has no fused form of (rmsprop, lars, lamb): whether the sums were finite stays there as a number, which the
optimizer, the running statistics and the moving average all obey. What the host must know of a step it reads later,
with `Pending.read`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.finite import SUM, Skipped, block, failed_forward, failed_sum, not_finite, total_norm
from hvdtrain.core.task import Batch, Sums, Task, Totals, total
from hvdtrain.profiling.phases import OFF, Phases
from hvdtrain.ranks.comm import Comm, Members, SerialComm
from hvdtrain.ranks.replicas import held_before
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe import batch_norm
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.stages.blocks import Blocks, run_all
from hvdtrain.stages.part import Part
from hvdtrain.sync.rounds import EVERY_STEP, Rounds

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


class Pending:
    """A step that the device may still be at."""

    def __init__(
        self,
        comm: Comm,
        together: Members,
        sync: GradientSync,
        names: Sequence[str],
        values: Tensor,
        *,
        found: Skipped | None,
        device: torch.device,
    ) -> None:
        """`together` are the ranks of all that take or skip the step together.

        `values` are the totals by name, then what is named in `read`.
        """
        self._comm, self._together = comm, together
        self._sync = sync
        self._names = names
        self._found = found
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = values

    def read(self) -> StepDone:
        """Wait for it, once; ranks that step together do so together, and tell each other why they have skipped it."""
        if self._copied is not None:
            self._copied.synchronize()
        *totals, was_skipped, bad_here, trouble, grad_norm = self._values.tolist()
        known = dict(zip(self._names, totals, strict=True))
        skipped = self._found
        if was_skipped and skipped is None:
            skipped = failed_forward(self._comm, self._together, known.get("loss", 0.0), trouble)
            skipped = skipped or failed_sum(self._comm, bad_here)
        self._sync.update(overflowed=skipped is not None and skipped.source.startswith(SUM))
        if skipped is not None and self._together.size < self._comm.size:
            skipped = replace(skipped, ranks=block(self._comm.rank - self._together.rank, self._together.size))
        known = self._comm.replica.allgather(known)[-1]  # the loss is computed on the last stage
        return StepDone(totals=known, skipped=skipped, grad_norm=grad_norm)

    def read_alone(self) -> StepDone:
        """The same as this rank knows it, who cannot ask the others why they have skipped the step."""
        if self._copied is not None:
            self._copied.synchronize()
        *totals, was_skipped, _, trouble, grad_norm = self._values.tolist()
        skipped = Skipped(rank=None, source=SUM) if was_skipped else None
        self._sync.update(overflowed=bool(was_skipped) and math.isfinite(trouble))
        return StepDone(totals=dict(zip(self._names, totals, strict=True)), skipped=skipped, grad_norm=grad_norm)


@dataclass(frozen=True, kw_only=True)
class _LastPass:
    """What tells whether this rank's own gradients were finite, once the sum over ranks has taken their place."""

    batch: Batch
    random: list[Tensor]  # the generators' states before it
    bad_before: Tensor  # 1 where the gradients of the passes before it were not finite


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
    average: MovingAverage | None = None  # follows the model after every step that is taken
    precision: str
    clip_value: float | None = None  # per gradient element
    clip_norm: float | None = None  # of all gradients together
    poisoned: bool = False  # the next loss becomes NaN, as an injected fault wants it
    rounds: Rounds = EVERY_STEP
    find_nan: bool = False  # after a skipped step look for the rank whose own gradients were not finite
    phases: Phases = OFF
    recomputed: Blocks | None = None  # of the model: what is inside them is computed again in the backward pass
    part: Part | None = None  # this rank's stage, where a replica is cut into several; `model` is what it has of it
    undoable: bool = False  # a rank may be lost in a step, which the others then undo
    _statistics: list[Tensor] = field(init=False)  # batch norm's running ones
    _twice: set[int] = field(init=False)  # identities of parameters that another rank of the replica counts already
    _begun_with: tuple[Tensor, list[Tensor]] | None = field(init=False, default=None)  # these, and the random state

    def __post_init__(self) -> None:
        self._statistics = batch_norm.running_statistics(self.model)
        self._twice = held_before(self.comm, self.model) if self.part is None else self.part.twice(self.model)

    @property
    def evaluated(self) -> nn.Module:
        """The moving average of the weights if there is one, else the model itself."""
        return self.model if self.average is None else self.average.model()

    @property
    def together(self) -> Members:
        """The ranks whose gradients are summed: they take or skip a step together."""
        return self.comm.near if self.rounds.apart else self.comm

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
    ) -> Pending:
        """Take one step with the given learning rate, or skip it on all ranks.

        `micro_batches` yields `backward_passes` batches, prepared by the task; each may be empty. The loss is divided
        by `global_count`, what the samples of all ranks that step together weigh in all passes, so that the summed
        gradients are those of the mean loss. `measure` asks for the gradients' norm.
        """
        statistics = before = self._flat_statistics()
        if self.undoable:
            self._begun_with = before, _random_state()
        last_pass = None
        done: list[Sums] = []
        troubles: list[Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.overlap = not self.phases.alone
        self.sync.expect(backward_passes)
        if self.part is not None:
            done, troubles = self._through_stages(self.part, micro_batches, backward_passes, global_count)
            statistics, micro_batches = self._flat_statistics(), ()
        for number, batch in enumerate(micro_batches, start=1):
            if self.find_nan and number == backward_passes:
                last_pass = _LastPass(batch=batch, random=_random_state(), bad_before=self._bad_gradients())
            self.phases.enter("forward")
            sums = self._loss(batch)
            self.phases.enter("backward")
            # A loss or a running statistic that is not finite does not always have such gradients: this makes sure of
            # it, so that the other ranks hear of it with the sum. It is 0, or NaN.
            statistics = self._flat_statistics()
            troubles.append(0 * (sums.loss.detach() + statistics.sum()))
            self.scaler.scale(sums.loss / (global_count + troubles[-1])).backward()
            done.append(replace(sums, loss=sums.loss.detach()))
        assert len(troubles) == backward_passes
        self.phases.enter("sync")
        self.sync.finish()
        if self.part is not None:
            self.part.sum_tied(self.model)
        self.phases.enter("optimizer")
        self.scaler.unscale_(self.optimizer)
        gradients = self._gradients()
        # Ranks that step together have the same summed gradients, and NaN and infinity survive a sum, so they decide
        # alike without asking each other. That would not hold for Adasum (it divides by norms), or for sparse gradients
        # (gathered, not summed).
        trouble = torch.stack(troubles).sum()
        skip = bad_here = not_finite(gradients, SerialComm())
        if self.comm.replica.size > 1:  # what a part sees of its own forward pass is in no sum of another's gradients
            bad_here = not_finite([*gradients, trouble], SerialComm())
            skip = not_finite([*gradients, trouble], self.comm)
        grad_norm = self._norm() if measure else torch.full_like(skip, torch.nan)
        self._set_statistics(torch.where(skip == 0, statistics, before))
        self._clip_and_step(lr, skip)
        names, totals = total(done) if done else ([], torch.zeros(0, dtype=torch.float64, device=self.device))
        # Before the loss scale changes: at half of it the gradients may be finite.
        found = self._find_source(last_pass, totals, trouble, skip, global_count) if last_pass is not None else None
        self.scaler.update()
        if self.average is not None and not self.rounds.apart:
            self.average.follow(skip)
        self._begun_with = None
        values = torch.cat([totals, torch.stack([skip, bad_here, trouble, grad_norm]).double()])
        return Pending(self.comm, self.together, self.sync, names, values, found=found, device=self.device)

    def undo(self) -> None:
        """Be as before a step whose sums failed; as after it where nothing has failed."""
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()  # else it takes gradients for unscaled
        if self._begun_with is not None:
            statistics, random = self._begun_with
            self._set_statistics(statistics)
            _restore_random_state(random)
            self._begun_with = None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _norm(self) -> Tensor:
        """Of all gradients of the model, those of the replica's other ranks among them."""
        groups = [
            [one.grad for one in group["params"] if one.grad is not None and id(one) not in self._twice]
            for group in self.optimizer.param_groups
        ]
        return total_norm(groups, self.comm.replica)

    def _through_stages(
        self, part: Part, micro_batches: Iterable[Batch], count: int, global_count: float
    ) -> tuple[list[Sums], list[Tensor]]:
        """Forward and backward passes of this stage: the sums, on the last one, and each forward pass's trouble."""
        coming, held = iter(micro_batches), dict[int, Batch]()
        done: list[Sums] = []
        troubles: list[Tensor] = []

        def inputs(number: int) -> tuple[Tensor, ...]:
            if number not in held:
                held[number] = next(coming)
            return self.task.inputs(held[number])

        def forward(number: int, received: Tensor | None) -> Tensor:
            given = inputs(number)
            self.phases.enter("forward")
            with self._training(given[0]):
                sent = part.run(self.model, received, given)
            if not part.is_last:
                sent = sent * math.nan if self.poisoned else sent
                troubles.append(0 * (sent.detach().sum(dtype=torch.float64) + self._flat_statistics().sum()))
                del held[number]
            self.phases.enter("bubble")
            return sent

        def loss(number: int, outputs: Tensor) -> Tensor:
            self.phases.enter("loss")
            with precision_context(self.device, self.precision):
                sums = self._poisoned(self.task.loss(lambda *_: outputs, held.pop(number), training=True))
            troubles.append(0 * (sums.loss.detach() + self._flat_statistics().sum()))
            done.append(replace(sums, loss=sums.loss.detach()))
            scaled: Tensor = self.scaler.scale(sums.loss / (global_count + troubles[-1]))
            return scaled

        def room(number: int) -> Tensor:
            given = inputs(number)
            self.phases.enter("bubble")
            return part.room(given, self.device)

        part.pipeline.train(count, forward=forward, loss=loss, room=room)
        return done, troubles

    def evaluation(self, model: nn.Module, batch: Batch) -> list[Sums]:
        """The sums of a prepared batch; none where they are the last stage's."""
        part, context = self.part, precision_context(self.device, self.precision)
        if part is None:
            with context:
                return [self.task.loss(model, batch, training=False)]
        done: list[Sums] = []
        inputs = self.task.inputs(batch)

        def forward(_: int, received: Tensor | None) -> Tensor:
            with context:
                outputs = part.run(model, received, inputs)
                if part.is_last:
                    done.append(self.task.loss(lambda *_: outputs, batch, training=False))
            return outputs

        part.pipeline.evaluate(forward=forward, room=lambda _: part.room(inputs, self.device))
        return done

    @contextmanager
    def _training(self, samples: Tensor) -> Iterator[None]:
        """In the precision of the run; batch norm stays as it is where there are too few of the samples (N, ...)."""
        frozen: AbstractContextManager[None] = batch_norm.frozen(self.model) if len(samples) < 2 else nullcontext()
        with precision_context(self.device, self.precision), frozen:
            yield

    def _loss(self, batch: Batch) -> Sums:
        with self._training(next(iter(batch.values()))):
            sums = self.task.loss(self._forward, batch, training=True)
        return self._poisoned(sums)

    def _poisoned(self, sums: Sums) -> Sums:
        return replace(sums, loss=sums.loss * math.nan) if self.poisoned else sums

    def _forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        if self.recomputed is not None and len(inputs[0]) > 1:  # see batch_norm.frozen
            outputs: Any = run_all(self.model, self.recomputed.row, None, inputs, recompute=True)
        else:
            outputs = self.model(*inputs, **named_inputs)
        self.phases.enter("loss")
        return outputs

    def _clip_and_step(self, lr: float, skip: Tensor) -> None:
        parameters = self._parameters()
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, self._norm())
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Of torch's optimizers the fused ones look at a number on the device; for the others the host waits for it.
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.grad_scale, self.optimizer.found_inf = None, skip  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not skip.item():
            self.optimizer.step()

    def _find_source(
        self, last_pass: _LastPass, totals: Tensor, trouble: Tensor, skip: Tensor, global_count: float
    ) -> Skipped | None:
        """The first rank whose forward pass, or else whose own gradients, were not finite; all ranks look together."""
        if not skip.item():
            return None
        self.phases.enter("other")
        failed = failed_forward(self.comm, self.together, totals[0].item(), trouble.item())
        if failed is not None:
            return failed
        # Once more without Horovod: autograd.grad does not reach the hooks that communicate.
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        statistics = self._flat_statistics()
        _restore_random_state(last_pass.random)
        scaled = self.scaler.scale(self._loss(last_pass.batch).loss / global_count)
        self.phases.enter("other")
        gradients = torch.autograd.grad(scaled, trainable, allow_unused=True)
        bad_here = not all(bool(torch.isfinite(own).all()) for own in gradients if own is not None)
        self._set_statistics(statistics)
        bad_gradients = self.together.allgather(bad_here or bool(last_pass.bad_before))
        if not any(bad_gradients):
            return Skipped(rank=None, source=SUM)
        return Skipped(rank=self.comm.rank - self.together.rank + bad_gradients.index(True), source="gradients")

    def _bad_gradients(self) -> Tensor:
        """1 where this rank's own gradients are not finite so far."""
        gradients = self._gradients()
        return not_finite(gradients, SerialComm()) if gradients else torch.zeros((), device=self.device)

    def _flat_statistics(self) -> Tensor:
        """All running statistics, one after the other."""
        return torch.cat(self._statistics) if self._statistics else torch.zeros(0, device=self.device)

    def _set_statistics(self, flat: Tensor) -> None:
        if self._statistics:
            torch._foreach_copy_(self._statistics, flat.split([len(one) for one in self._statistics]))


def _random_state() -> list[Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def _restore_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
