"""Undoes a step after its sums have failed."""

from torch import Tensor

from hvdtrain.core.random_state import random_state, restore_random_state
from hvdtrain.core.step import Step, Witness


class Undo(Witness):
    """Saves what a step changes before its sums, which is little, because gradients are recomputed."""

    def __init__(self) -> None:
        self._before: tuple[Tensor, list[Tensor]] | None = None

    def begin(self, step: Step) -> None:
        self._before = step.statistics.flat(), random_state()

    def end(self, step: Step) -> None:
        self._before = None

    def undo(self, step: Step) -> None:
        """Restore the state before the step, or after it if nothing has failed."""
        if step.scaler.is_enabled():
            step.scaler._per_optimizer_states.clear()  # else it would treat gradients as unscaled
        if self._before is not None:
            statistics, random = self._before
            step.statistics.set(statistics)
            restore_random_state(random)
            self._before = None
