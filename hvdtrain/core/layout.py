"""The layout of a replica: how micro-batches pass through a model that one rank holds, or several."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hvdtrain.core.model import batch_norm
from hvdtrain.core.model.state import Places
from hvdtrain.core.parts import Whole
from hvdtrain.core.phases import Phases
from hvdtrain.core.task import Batch, Sums, Task
from hvdtrain.settings.safety.errors import BadInput


class Forward(Protocol):
    """The part of a step that a layout uses: the model, and the surroundings of its forward passes."""

    model: nn.Module
    task: Task
    phases: Phases

    @property
    def device(self) -> Any:
        """The model's device."""

    def context(self, samples: Tensor | None) -> AbstractContextManager[None]:
        """Enter the run's precision; for training, pass the samples (N, ...), since batch norm needs at least two."""

    def loss(self, model: Callable[..., Any], batch: Batch, *, training: bool) -> Sums:
        """Return the task's sums over a batch."""

    def pass_on(self, outputs: Tensor) -> Tensor:
        """Return the outputs of a rank that does not compute the loss, as the next rank's inputs."""


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


@dataclass(kw_only=True)
class Passes:
    """The forward passes of one step on this rank; its layout adds each of them."""

    count: int  # of the passes
    global_count: float  # the loss is divided by it
    scale: Callable[[Tensor], Tensor]  # of the loss, for fp16
    statistics: Statistics  # of the model
    sums: list[Sums] = field(default_factory=list)  # of a rank that computes the loss
    # For each pass 0, or NaN if its output or the running statistics are not finite; gradients may be finite then. The
    # NaN enters the sum, so that other ranks skip the step, too.
    troubles: list[Tensor] = field(default_factory=list)
    latest: Tensor = field(init=False)  # the running statistics after the last pass

    def add(self, sums: Sums) -> Tensor:
        """Add a pass with the loss of a micro-batch; return the scaled loss, ready for backward."""
        require_gradient(sums.loss)
        loss = sums.loss.detach()
        self._add(loss)
        self.sums.append(replace(sums, loss=loss))
        return self.scale(sums.loss / ((self.global_count or 1.0) + self.troubles[-1]))  # 0: a group without samples

    def add_outputs(self, outputs: Tensor) -> None:
        """Add a pass whose outputs go to another rank, which computes the loss."""
        self._add(outputs.detach().sum(dtype=torch.float64))

    def _add(self, value: Tensor) -> None:
        self.latest = self.statistics.flat()
        self.troubles.append(0 * (value + self.latest.sum()))


def require_gradient(loss: Tensor) -> None:
    """Raise BadInput for a loss that backward cannot begin at."""
    if not loss.requires_grad:
        raise BadInput("the loss has no gradient: it was detached, or computed under no_grad. Return it as computed.")


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
    """A whole replica on each rank; subclasses split it over several ranks, or compute it in another way."""

    part: Whole = Whole()  # of the replica, on this rank
    metadata: Mapping[str, Any] = {}  # the layout's description in a checkpoint

    def compile(self, models: Iterable[nn.Module]) -> None:
        """Let torch compile the parts of these models that the layout calls."""
        for model in models:
            model.compile()

    def train(self, step: Forward, batches: Iterable[Batch], passes: Passes) -> None:
        """Run forward and backward of the micro-batches of a step."""
        for batch in batches:
            step.phases.enter("forward")
            sums = self.forward(step, batch)
            step.phases.enter("backward")
            passes.add(sums).backward()

    def call(self, model: nn.Module, *inputs: Any, **named: Any) -> Any:
        """Call the model in training."""
        return model(*inputs, **named)

    def forward(self, step: Forward, batch: Batch) -> Sums:
        """Run one forward pass in training."""

        def call(*inputs: Any, **named: Any) -> Any:
            outputs = self.call(step.model, *inputs, **named)
            step.phases.enter("loss")
            return outputs

        first = next(iter(batch.values()))
        is_samples = isinstance(first, list) or (isinstance(first, Tensor) and first.dim() > 0)
        with step.context(first if is_samples else None):
            return step.loss(Called(step.model, call), batch, training=True)

    def evaluate(self, step: Forward, model: nn.Module, read: Callable[[], Batch]) -> list[Sums]:
        """Evaluate the batch that `read` prepares; return its sums, or nothing if another rank computes them."""
        batch = read()
        with step.context(None):
            return [step.loss(model, batch, training=False)]

    def describe(self) -> str:
        """Describe for the user what each rank holds; empty if each rank holds the whole model."""
        return ""
