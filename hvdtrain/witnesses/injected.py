"""Injected faults: what they do at a step, and to its loss."""

import math

from torch import Tensor, nn

from hvdtrain.core.slots import Witness
from hvdtrain.loop.hooks import Hook
from hvdtrain.safety.faults import Faults


class InjectedFaults(Hook, Witness):
    """Inflicts the faults of this rank when their place comes."""

    def __init__(self, faults: Faults, model: nn.Module) -> None:
        self._faults, self._model = faults, model
        self._is_nan = False

    def begin_step(self, number: int) -> None:
        self._faults.inflict_at("step", number, model=self._model)
        self._is_nan = self._faults.injects_nan(number)

    def pass_on(self, values: Tensor) -> Tensor:
        return values * math.nan if self._is_nan else values

    def epoch_trained(self, count: int) -> None:
        self._faults.inflict_at("eval", count)
