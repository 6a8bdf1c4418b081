"""The four slots of a step, each with a default that costs nothing.

`comm`: the ranks. `where`: how a replica is laid out on them. `how`: how gradients are summed (ranks.sync). `when`:
when replicas become equal. A feature fills a slot, or is a witness that watches steps from inside; no slot knows
another.
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
    """The interface of a step that a layout uses to run micro-batches."""

    model: nn.Module
    task: Task

    @property
    def device(self) -> Any:
        """The model's device."""

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the model's arguments."""

    def context(self, samples: Tensor | None) -> AbstractContextManager[None]:
        """Enter the run's precision; for training, pass the samples (N, ...), since batch norm needs at least two."""

    def loss(self, forward: Callable[..., Any], batch: Batch, *, training: bool) -> Sums:
        """Return the task's sums over a batch."""

    def record_loss(self, sums: Sums, global_count: float) -> Tensor:
        """Record the sums of a micro-batch; return its scaled loss, ready for backward."""

    def hand_on(self, outputs: Tensor) -> Tensor:
        """Record and return the outputs of a rank that does not compute the loss; they are the next rank's inputs."""

    def begin_last_pass(self, batch: Batch) -> None:
        """Prepare for the last micro-batch of a step."""

    def enter(self, phase: Any) -> None:
        """Enter a phase of the profile."""


class Called:
    """The model as a loss sees it in training: its call is `call`, and its attributes are the model's."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self.__dict__.update(_model=model, _call=call)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._call(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __getitem__(self, part: Any) -> Any:  # of a Sequential: Python does not call __getattr__ for it
        return self._model[part]


class Layout:
    """Places a whole replica on each rank; subclasses split it over several ranks.

    Ranks that step together have the same summed gradients, and NaN and infinity survive a sum, so every rank reaches
    the same decision without communication. This would not hold for Adasum, which divides by norms, or for sparse
    gradients, which are gathered and not summed.
    """

    rank, ranks = 0, 1  # this rank's number in its replica, and the number of ranks of the replica
    part = ""  # the kind of part that a rank holds; empty if it holds the whole model
    about: Mapping[str, Any] = {}  # the layout's description in a checkpoint

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        """Create the layout; `call` replaces the model's call in training, and receives the model and its inputs."""
        self._call = call

    def compile(self, models: Iterable[nn.Module]) -> None:
        """Let torch compile the parts of these models that the layout calls."""
        for model in models:
            model.compile()

    def stream(self, comm: Comm) -> int:
        """Return the number of this rank's stream of random numbers."""
        return comm.rank

    def train(self, step: Passes, batches: Iterable[Batch], count: int, global_count: float) -> None:
        """Run forward and backward of `count` micro-batches."""
        for number, batch in enumerate(batches, start=1):
            if number == count:
                step.begin_last_pass(batch)
            step.enter("forward")
            sums = self.forward(step, batch)
            step.enter("backward")
            step.record_loss(sums, global_count).backward()

    def forward(self, step: Passes, batch: Batch) -> Sums:
        """Run one forward pass in training."""
        with step.context(next(iter(batch.values()))):
            return step.loss(self._model(step), batch, training=True)

    def _model(self, step: Passes) -> Callable[..., Any]:
        def call(*inputs: Any, **named: Any) -> Any:
            outputs = step.model(*inputs, **named) if self._call is None else self._call(step.model, *inputs, **named)
            step.enter("loss")
            return outputs

        return Called(step.model, call)

    def evaluate(self, step: Passes, model: nn.Module, read: Callable[[], Batch]) -> list[Sums]:
        """Evaluate the batch that `read` prepares; return its sums, or nothing if another rank computes them."""
        batch = read()
        with step.context(None):
            return [step.loss(model, batch, training=False)]

    def sum_tied(self, model: nn.Module, tensors_of: TensorsOf) -> None:
        """Sum tensors of parameters that two ranks of a replica both hold, such as gradients; both get the same bits.

        The sum over replicas is done already.
        """

    def decide_skip(self, gradients: Sequence[Tensor], trouble: Tensor, group: Members) -> tuple[Tensor, Tensor]:
        """Return two flags: the ranks of `group`, which step together, skip the step; and this rank sees the cause.

        `trouble` is ignored, because batch norm statistics can be NaN only on a rank without samples, and that rank
        would skip the step alone.
        """
        bad = not_finite(gradients, SerialComm())
        return bad, bad

    def norm(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        """Return the 2-norm of all gradients of a replica; `groups` are the optimizer's parameter groups."""
        return total_norm([[one.grad for one in group if one.grad is not None] for group in groups], SerialComm())

    def share(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the totals of the rank that computes the loss."""
        return totals

    def sent_bytes(self) -> tuple[dict[int, int], int]:
        """Return the bytes that a step sends inside the replica, as means over this process's steps.

        The first value maps each later rank to the bytes exchanged with it, per direction; the second is the size of
        the tensors that all ranks of the replica sum.
        """
        return {}, 0

    def name_failure(self, source: str) -> str:
        """Return the source of a failed forward pass, with the part of the replica in which it failed."""
        return source

    def name_failed_sum(self, bad_here: float) -> str:
        """Return the source if the summed gradients are not finite, with the part of the replica."""
        return SUM

    def split_dimensions(self, model: nn.Module) -> dict[str, int]:
        """Return the split dimension of each parameter that is only partly on this rank."""
        return {}

    def gather_full(self, comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state dict on rank 0, and an empty dict on other ranks; a collective."""
        return model.state_dict() if comm.rank == 0 else {}

    def describe(self) -> str:
        """Describe for the user what each rank holds; empty if each rank holds the whole model."""
        return ""


class Parts(Layout):
    """A replica that is split over several ranks, each of which sees only the failures of its own forward pass."""

    def __init__(self, comm: Comm, counted_before: set[int], call: Callable[..., Any] | None = None) -> None:
        """Create the layout; `counted_before` are the ids of parameters that an earlier rank of the replica counts."""
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

        device = next(model.parameters()).device
        return gather_parts(comm, model.state_dict(), self.split_dimensions(model), device)

    def name_failure(self, source: str) -> str:
        return f"{source} of {self.part} {self.rank}"

    def name_failed_sum(self, bad_here: float) -> str:
        bad = self._comm.replica.allgather(bad_here)  # backward runs from the last part to the first
        return f"{SUM} of {self.part} {max(part for part, is_bad in enumerate(bad) if is_bad)}"


class Follower(Protocol):
    """A moving average of the model."""

    def follow(self, not_finite: Tensor, *, steps: int = 1) -> None:
        """Move towards the model by `steps` steps; do nothing if the scalar `not_finite` is 1."""

    def model(self) -> nn.Module:
        """Return the averaged model."""


class Weighed(Protocol):
    """One rank's part of a global batch."""

    @property
    def global_count(self) -> float:
        """The weight of the samples of all ranks."""

    @property
    def group_count(self) -> float:
        """The weight of the samples of the ranks that sum their gradients at every step."""


class EveryStep:
    """The default schedule: all ranks sum their gradients at every step, and replicas are always equal."""

    is_apart = False  # whether groups of ranks step on their own
    waited_s = 0.0  # for other groups at the last synchronization

    def step_group(self, comm: Comm) -> Members:
        """Return the ranks that take or skip the next step together."""
        return comm

    def weight(self, batch: Weighed) -> float:
        """Return the weight of the samples of the ranks that step together."""
        return batch.global_count

    def follow(self, average: Follower, skip: Tensor) -> None:
        """Let the moving average follow the model after a step, unless only one group has taken the step."""
        average.follow(skip)

    def begin(self, epoch: int, step: int) -> None:
        """Begin or resume an epoch after this step."""

    def syncs_after(self, step: int, *, last: int) -> bool:
        """Return whether replicas are equal after this step; `last` is the last step of the epoch."""
        return True

    def sync(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        """Make replicas equal after this step; return why the run ends, if any rank ends it."""
        return end


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a step at the time of the decision to take or skip it."""

    totals: Tensor  # sums by name, 'loss' first
    trouble: Tensor  # 0, or NaN after a forward pass that was not finite
    skip: Tensor  # 1 if the step is skipped because its sums were not finite
    global_count: float


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A witness's decision about a step with finite sums."""

    skip: Tensor  # 1 if the ranks that step together skip it, else 0; equal on all of them
    explain: Callable[[], Skipped]  # returns the reason, once the device has finished the step


class Witness:
    """Watches steps from inside; by default every method does nothing."""

    def begin(self, step: "Step") -> None:
        """Called before the step changes anything."""

    def pass_on(self, values: Tensor) -> Tensor:
        """Return the output of a forward pass (the loss, or what a part passes on), or a replacement for it."""
        return values

    def begin_last_pass(self, step: "Step", batch: Batch) -> None:
        """Called before the last micro-batch."""

    def refuse(self, step: "Step") -> Refusal | None:
        """Decide on the device whether to skip the step; gradients are summed and unscaled, but not clipped."""

    def explain(self, step: "Step", outcome: Outcome) -> Skipped | None:
        """Return why the step was skipped, if this witness knows; called by all ranks that step together."""

    def end(self, step: "Step") -> None:
        """Called after the step was taken or skipped."""


@dataclass(kw_only=True)
class Slots:
    """The slots of a step with their contents."""

    comm: Comm
    how: GradientSync
    where: Layout = field(default_factory=Layout)
    when: EveryStep = field(default_factory=EveryStep)
    witnesses: list[Witness] = field(default_factory=list)  # called in this order
