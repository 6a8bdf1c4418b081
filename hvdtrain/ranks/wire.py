"""The types in which tensors are sent: gradients also with a scale, to avoid overflow; any tensor as its bits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Number of steps without an overflow after which the scale is doubled, as in torch's GradScaler.
GROWTH_STEPS = 2000

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def bits(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's memory as integers, which Horovod and MPI can send; a complex number is two."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return values.view(_INTEGERS[values.element_size()])


def at_least_float(tensor: Tensor) -> Tensor:
    """Return the tensor as float32, or as it is if it is float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def change_together(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> None:
    """Copy the parts of what `change` returns for the concatenation of these tensors into them."""
    flat = change(torch.cat([tensor.detach().flatten().to(tensors[0].device) for tensor in tensors]))
    parts = zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True)
    torch._foreach_copy_([tensor.detach() for tensor in tensors], [part.view_as(tensor) for tensor, part in parts])


class Wire:
    """The type and scale of gradients on the wire.

    In fp16, values of at most 2^-25 become 0, and values above 65504 become infinite. The ranks' losses are divided by
    the global batch, so each rank's gradients shrink as ranks are added. They are therefore multiplied by the largest
    power of two that is not above the number of ranks, which makes them as large as those of one rank, or more than
    half as large.

    If their sum overflows, the step is skipped and the scale halved; after GROWTH_STEPS steps it is doubled, up to its
    initial value. All ranks see the same sum, so their scales stay equal. If the loss itself is scaled, which raises
    the gradients of all ranks and is also lowered after an overflow, this scale stays 1.
    """

    def __init__(self, ranks: int, *, is_half: bool, loss_is_scaled: bool = False) -> None:
        """Create the wire; it scales only if it `is_half`, that is fp16."""
        self.is_half, self._scales = is_half, is_half and not loss_is_scaled
        self._first_scale = 2.0 ** (ranks.bit_length() - 1) if self._scales else 1.0
        self.scale = self._first_scale
        self._calm_steps = 0  # since the scale last changed

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of this type are sent."""
        if self.is_half:
            return torch.float16
        return torch.float32 if dtype == torch.bfloat16 else dtype

    def pack(self, flat: Tensor, wire_values: Tensor) -> None:
        """Scale flat gradients in place, and copy them into the tensor to send unless it is the same tensor."""
        if self.scale != 1:
            flat.mul_(self.scale)
        if wire_values is not flat:
            wire_values.copy_(flat)

    def unpack(self, wire_values: Tensor, flat: Tensor) -> None:
        """Copy the received sum into the flat gradients, unscaled."""
        if wire_values is not flat:
            flat.copy_(wire_values)
        if self.scale != 1:
            flat.div_(self.scale)

    def end_step(self, *, overflowed: bool) -> None:
        """End a step; `overflowed` is whether the sum was not finite after finite forward passes on all ranks."""
        if not self._scales:
            return
        self._calm_steps = 0 if overflowed else self._calm_steps + 1
        if overflowed:
            self.scale /= 2
        elif self._calm_steps == GROWTH_STEPS:
            self.scale = min(2 * self.scale, self._first_scale)
            self._calm_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale for a checkpoint, if there is one."""
        return {"scale": self.scale, "calm_steps": self._calm_steps} if self._scales else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale of a checkpoint; keep the initial scale if it has none."""
        if self._scales:
            self.scale, self._calm_steps = state.get("scale", self._first_scale), state.get("calm_steps", 0)
