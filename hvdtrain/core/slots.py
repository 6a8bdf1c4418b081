"""The four questions that a step asks, each a slot with a plain answer that costs nothing.

`comm`: who are the ranks. `where`: how a replica lies on them. `how`: how gradients travel (ranks.sync). `when`: when
replicas become equal. A feature fills a slot, or is a witness that watches steps from inside; no slot knows another.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from hvdtrain.core.finite import SUM, Skipped, not_finite, total_norm
from hvdtrain.core.task import Batch, Sums, Task
from hvdtrain.ranks.comm import Comm, Members, SerialComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.safety.exits import EndOfRun

if TYPE_CHECKING:
    from hvdtrain.core.step import Step


TensorsOf = Callable[[nn.Parameter], Iterable[Tensor]]


class Passes(Protocol):
    """What a layout runs micro-batches with: the step, as far as a layout knows it."""

    model: nn.Module
    task: Task

    @property
    def device(self) -> Any:
        """The model's."""

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the model is called with."""

    def context(self, samples: Tensor | None) -> AbstractContextManager[None]:
        """In the run's precision; for training with the samples (N, ...), of which there may be too few."""

    def loss(self, forward: Callable[..., Any], batch: Batch, *, training: bool) -> Sums:
        """The task's sums over a batch."""

    def record_loss(self, sums: Sums, global_count: float) -> Tensor:
        """Count a micro-batch's sums; its loss, scaled, to go backward from."""

    def hand_on(self, outputs: Tensor) -> Tensor:
        """Record the outputs of a rank that does not compute the loss; they are the next rank's inputs."""

    def begin_last_pass(self, batch: Batch) -> None:
        """The last micro-batch of a step comes."""

    def enter(self, phase: Any) -> None:
        """A phase of the profile begins."""


class Layout:
    """A replica is whole on each rank; subclasses lay it on several.

    Ranks that step together have the same summed gradients, and NaN and infinity survive a sum, so they decide alike
    without asking each other. That would not hold for Adasum (it divides by norms), or for sparse gradients (gathered,
    not summed).
    """

    rank, ranks = 0, 1  # this one among those of its replica, and how many these are
    part = ""  # what each of them holds
    about: Mapping[str, Any] = {}  # what a checkpoint says of it

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        """`call` replaces the model's own in training; it gets the model and its inputs."""
        self._call = call

    def compile(self, models: Iterable[nn.Module]) -> None:
        """Let torch compile what is called of these models."""
        for model in models:
            model.compile()

    def stream(self, comm: Comm) -> int:
        """The number of this rank's random numbers."""
        return comm.rank

    def train(self, step: Passes, batches: Iterable[Batch], count: int, global_count: float) -> None:
        """Take `count` micro-batches forward and backward."""
        for number, batch in enumerate(batches, start=1):
            if number == count:
                step.begin_last_pass(batch)
            step.enter("forward")
            sums = self.forward(step, batch)
            step.enter("backward")
            step.record_loss(sums, global_count).backward()

    def forward(self, step: Passes, batch: Batch) -> Sums:
        """One forward pass in training."""
        with step.context(next(iter(batch.values()))):
            return step.loss(self._model(step), batch, training=True)

    def _model(self, step: Passes) -> Callable[..., Any]:
        def model(*inputs: Any, **named: Any) -> Any:
            outputs = step.model(*inputs, **named) if self._call is None else self._call(step.model, *inputs, **named)
            step.enter("loss")
            return outputs

        return model

    def evaluate(self, step: Passes, model: nn.Module, read: Callable[[], Batch]) -> list[Sums]:
        """The sums of the batch that `read` prepares, if this rank needs it; none if they are another rank's."""
        batch = read()
        with step.context(None):
            return [step.loss(model, batch, training=False)]

    def sum_tied(self, model: nn.Module, tensors_of: TensorsOf) -> None:
        """Sum what two ranks of a replica have of parameters that both hold, such as gradients; on both the same bits.

        Replicas are summed already.
        """

    def decide_skip(self, gradients: Sequence[Tensor], trouble: Tensor, group: Members) -> tuple[Tensor, Tensor]:
        """1 if the ranks of `group`, which step together, skip the step, and 1 if this rank sees why; else 0.

        `trouble` is not looked at: a rank without samples may have NaN in its statistics alone, and would skip alone.
        """
        bad = not_finite(gradients, SerialComm())
        return bad, bad

    def norm(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        """The 2-norm of all gradients of a replica; `groups` are the optimizer's."""
        return total_norm([[one.grad for one in group if one.grad is not None] for group in groups], SerialComm())

    def share(self, totals: dict[str, float]) -> dict[str, float]:
        """The totals of the rank that computes the loss."""
        return totals

    def sent_bytes(self) -> tuple[dict[int, int], int]:
        """What a step sends inside the replica, the mean over this process's steps.

        Bytes that this rank and a later one exchange, each way, by the number of the other, and bytes of the tensors
        that all ranks of the replica sum.
        """
        return {}, 0

    def name_failure(self, source: str) -> str:
        """The source of a failed forward pass, with the part of the replica that it was in."""
        return source

    def name_failed_sum(self, bad_here: float) -> str:
        """The same for summed gradients."""
        return SUM

    def split_dimensions(self, model: nn.Module) -> dict[str, int]:
        """The parameters of which this rank holds a part only, and the dimension in which they are split."""
        return {}

    def gather_full(self, comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        """The state dict of the whole model on rank 0; elsewhere nothing. All ranks call it."""
        return model.state_dict() if comm.rank == 0 else {}

    def describe(self) -> str:
        """Who has what, for people; nothing if each rank has all."""
        return ""


class Parts(Layout):
    """A replica lies on several ranks: what one sees of its forward pass is in no sum of another's gradients."""

    def __init__(self, comm: Comm, counted_before: set[int], call: Callable[..., Any] | None = None) -> None:
        """`counted_before` are the identities of parameters that an earlier rank of the replica counts already."""
        super().__init__(call)
        self._comm, self._counted_before = comm, counted_before
        self.rank, self.ranks = comm.replica.rank, comm.replica.size

    def decide_skip(self, gradients: Sequence[Tensor], trouble: Tensor, group: Members) -> tuple[Tensor, Tensor]:
        bad_here = not_finite([*gradients, trouble], SerialComm())
        return not_finite([*gradients, trouble], group), bad_here

    def norm(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        counted = [
            [one.grad for one in group if one.grad is not None and id(one) not in self._counted_before]
            for group in groups
        ]
        return total_norm(counted, self._comm.replica)

    def share(self, totals: dict[str, float]) -> dict[str, float]:
        last: dict[str, float] = self._comm.replica.allgather(totals)[-1]
        return last

    def gather_full(self, comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        from hvdtrain.replica.point_to_point import gather_parts

        return gather_parts(comm, model.state_dict(), self.split_dimensions(model))

    def name_failure(self, source: str) -> str:
        return f"{source} of {self.part} {self.rank}"

    def name_failed_sum(self, bad_here: float) -> str:
        bad = self._comm.replica.allgather(bad_here)  # backward passes go from the last part to the first
        return f"{SUM} of {self.part} {max(part for part, is_bad in enumerate(bad) if is_bad)}"


class Follower(Protocol):
    """A moving average of the model."""

    def follow(self, not_finite: Tensor, *, steps: int = 1) -> None:
        """Move towards the model, as far as in `steps` steps, or stay where the scalar `not_finite` is 1."""

    def model(self) -> nn.Module:
        """The averaged model."""


class Weighed(Protocol):
    """One rank's part of a global batch."""

    @property
    def global_count(self) -> float:
        """What the samples of all ranks weigh."""

    @property
    def group_count(self) -> float:
        """What those of the ranks weigh that sum their gradients at every step."""


class EveryStep:
    """The gradients of all ranks are summed at every step: replicas are always equal."""

    is_apart = False  # whether groups of ranks take steps of their own
    waited_s = 0.0  # for other groups, when all were synchronized last

    def step_group(self, comm: Comm) -> Members:
        """The ranks that take or skip the next step together."""
        return comm

    def weight(self, batch: Weighed) -> float:
        """What the samples of those ranks weigh."""
        return batch.global_count

    def follow(self, average: Follower, skip: Tensor) -> None:
        """A step was taken or skipped: let the moving average follow the model, unless it is one group's alone."""
        average.follow(skip)

    def begin(self, epoch: int, step: int) -> None:
        """An epoch begins, or continues, after this step."""

    def syncs_after(self, step: int, *, last: int) -> bool:
        """Whether replicas are equal after this step, `last` being the last one of the epoch."""
        return True

    def sync(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        """Become equal after this step; why the run ends, if it does for any rank."""
        return end


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is known of a step when it was decided."""

    totals: Tensor  # the sums by name, 'loss' first
    trouble: Tensor  # 0, or NaN after a forward pass that was not finite
    skip: Tensor  # 1 if the step is skipped since its sums were not finite
    global_count: float


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a witness thinks of a step whose sums are finite."""

    skip: Tensor  # 1 if the ranks that step together skip it, the same on all of them; else 0
    explain: Callable[[], Skipped]  # why, once the device has passed the step


class Witness:
    """Something that watches steps from inside; every method does nothing here."""

    def begin(self, step: "Step") -> None:
        """Nothing of the step has changed yet."""

    def pass_on(self, values: Tensor) -> Tensor:
        """What a forward pass has made, the loss or what a part hands on; or other values instead."""
        return values

    def begin_last_pass(self, step: "Step", batch: Batch) -> None:
        """The last micro-batch comes."""

    def refuse(self, step: "Step") -> Refusal | None:
        """Whether to skip the step, decided on the device; the gradients are summed and unscaled, but not clipped."""

    def explain(self, step: "Step", outcome: Outcome) -> Skipped | None:
        """Why the step was skipped, if this witness knows; all ranks that step together call it."""

    def end(self, step: "Step") -> None:
        """The step was taken or skipped."""


@dataclass(kw_only=True)
class Slots:
    """What fills the slots of a step."""

    comm: Comm
    how: GradientSync
    where: Layout = field(default_factory=Layout)
    when: EveryStep = field(default_factory=EveryStep)
    witnesses: list[Witness] = field(default_factory=list)  # in the order in which they are called
