"""Injects faults into a step and its loss."""

from torch import Tensor, nn

from hvdtrain.core.step import Step, Witness
from hvdtrain.loop.hooks import Hook
from hvdtrain.settings.safety.faults import NONE, Faults


class InjectedFaults(Hook, Witness):
    """Injects the faults of this rank at their places."""

    def __init__(self, faults: Faults, model: nn.Module) -> None:
        self._faults, self._model = faults, model
        self._factor = 1.0

    def begin_step(self, number: int) -> None:
        self._faults.inflict_at("step", number, model=self._model)
        self._factor = self._faults.loss_factor(number)

    def pass_on(self, values: Tensor) -> Tensor:
        return values if self._factor == 1 else values * self._factor

    def epoch_trained(self, count: int) -> None:
        self._faults.inflict_at("eval", count)


def injected_faults(faults: Faults, step: Step) -> list[Hook]:
    """Return the hook that injects the faults of this rank, which also sees each loss; none without faults."""
    if faults is NONE:
        return []
    injected = InjectedFaults(faults, step.model)
    step.slots.witnesses.append(injected)
    return [injected]
