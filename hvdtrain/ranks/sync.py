"""Gradients summed over ranks, by Horovod or by nobody."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hvdtrain.ranks.wire import Wire

WaitContext = Callable[[], AbstractContextManager[None]]


class Update(Protocol):
    """What a step does with summed gradients, each part once."""

    def unscale(self) -> Tensor:
        """Take the loss scale off the gradients and decide: 1 if all ranks skip the step, else 0."""

    def clip(self) -> None:
        """Clip the gradients."""

    def step(self) -> None:
        """Step the optimizer that `wrap` has returned, or skip it."""


class GradientSync:
    """Sums gradients over ranks while backward is still running; this one is for a rank that is alone."""

    overlap = True  # set to False before `expect` the sums begin in `finish`: a profile times each part alone

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that steps: the run's own, or one around it."""
        return optimizer

    def expect(self, backward_passes: int) -> None:
        """Say how many backward passes this rank makes before `finish`; communication starts in the last one."""

    def include(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Sum these parameters' gradients too; their names are new ones."""

    def finish(self) -> None:
        """Wait until every `.grad` holds the sum over ranks, of two or more zeros where none has a gradient."""

    def apply(self, update: Update) -> None:
        """Synchronize, unscale, clip and step, in the order that these sums need."""
        self.finish()
        update.unscale()
        update.clip()
        update.step()

    def end_step(self, *, overflowed: bool) -> None:
        """End a step; `overflowed` is whether the sum was not finite though no rank's forward pass had failed."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember from step to step, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class HorovodSync(GradientSync):
    """hvd.DistributedOptimizer used for its gradient hooks alone.

    The optimizers that it wraps have no part in the training: the real one stays as torch made it, with its defaults,
    its constructor's arguments and its zero_grad(set_to_none=True), all of which the wrapper would break.
    """

    def __init__(self, model: nn.Module, *, wire: Wire, groups: int | None, wait_context: WaitContext) -> None:
        """`wait_context` is entered while this rank waits for others."""
        self._wire = wire
        self._groups = groups
        self._wait_context = wait_context
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self.include(model.named_parameters())

    def include(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        import horovod.torch as hvd

        trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        parameters = [parameter for _, parameter in trainable]
        self._parameters += parameters
        # Sum, not Average: the loss is already divided by the global batch, so that ranks may hold unequal shards.
        hooks = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0),
            named_parameters=trainable,
            compression=self._wire,
            op=hvd.Sum,
            groups=self._groups and min(self._groups, len(parameters)),
        )
        _find_groups_fast(hooks)
        self._hooks.append(hooks)

    def expect(self, backward_passes: int) -> None:
        for hooks in self._hooks:  # with a pass that never comes the hooks send nothing, and `synchronize` everything
            hooks.set_backward_passes_per_step(backward_passes if self.overlap else backward_passes + 1)

    def finish(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:  # unused: Horovod's own zeros would have another memory format
                parameter.grad = torch.zeros_like(parameter)
        with self._wait_context():
            for hooks in self._hooks:
                hooks.synchronize()

    def end_step(self, *, overflowed: bool) -> None:
        self._wire.end_step(overflowed=overflowed)

    def state_dict(self) -> dict[str, Any]:
        return self._wire.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wire.load_state_dict(state)


class _ParameterGroup(tuple[nn.Parameter, ...]):
    """Found by its identity."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _find_groups_fast(hooks: Any) -> None:
    """Each of Horovod's hooks looks its group up in a dict, and a tuple's hash is that of all the parameters in it.

    With a single group that is the square of their number: see "Fusion groups" in docs/performance.md.
    """
    groups = {id(group): _ParameterGroup(group) for group in hooks._group_counts}
    hooks._p_to_group = {parameter: groups[id(group)] for parameter, group in hooks._p_to_group.items()}
    hooks._group_counts = dict.fromkeys(groups.values(), 0)
