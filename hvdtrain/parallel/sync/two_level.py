"""Two-level sums: inside a group of ranks, then between groups."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.ranks.sync import GradientSync, gradient_of
from hvdtrain.ranks.wire import Wire, change_together


class TwoLevelSync(GradientSync):
    """Sums gradients inside a group with another GradientSync, then over groups, unless the groups are `is_apart`."""

    is_apart = False  # whether this step's gradients stay in the group

    def __init__(
        self, in_group: GradientSync, model: nn.Module, sum_between: Callable[[Tensor], None], wire: Wire
    ) -> None:
        """Combine both levels; `sum_between` replaces a flat tensor by its sum over groups, sent in the type of `wire`.

        Both levels have equal scales: an overflow at either level halves both.
        """
        self._in_group, self._sum_between = in_group, sum_between
        self._wire: Wire = wire
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def carry(self, parameter: nn.Parameter) -> None:
        self._in_group.carry(parameter)
        self._parameters.append(parameter)

    def expect(self, backward_passes: int) -> None:
        self._in_group.overlap = self.overlap
        self._in_group.expect(backward_passes)

    def finish(self) -> None:
        self._in_group.finish()
        if self.is_apart:
            return
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._parameters):
            same_dtype = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            change_together([gradient_of(parameter) for parameter in same_dtype], self._sum_flat)

    def _sum_flat(self, flat: Tensor) -> Tensor:
        wire_dtype = self._wire.wire_dtype(flat.dtype)
        wire_values = flat if wire_dtype == flat.dtype else torch.empty_like(flat, dtype=wire_dtype)
        self._wire.pack(flat, wire_values)
        self._sum_between(wire_values)
        self._wire.unpack(wire_values, flat)
        return flat

    def end_step(self, *, overflowed: bool) -> None:
        self._in_group.end_step(overflowed=overflowed)
        super().end_step(overflowed=overflowed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_group.load_state_dict(state)
        super().load_state_dict(state)
