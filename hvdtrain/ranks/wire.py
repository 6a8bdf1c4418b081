"""In which type and scale gradients travel: those that Horovod and the sum can bear."""

from typing import Any

import torch
from torch import Tensor

# Steps without an overflow after which the scale is doubled again, as torch's GradScaler does.
GROWTH_STEPS = 2000


class Wire:
    """The type and the scale.

    In fp16 what is not above 2^-25 becomes 0, and what is above 65504 infinite. The ranks' losses are divided by the
    global batch, so that each rank's gradients shrink as ranks are added. They are sent times the largest power of two
    that is not above the number of ranks, so that they are as large as those of one rank, or more than half of that.
    Their sum may overflow, and the step is skipped. That halves the scale; after GROWTH_STEPS steps it is doubled, up
    to where it began. All ranks see the same sum, so their scales stay equal. Where the loss has a scale, which lifts
    the gradients of all ranks and falls after such a sum too, this one stays 1.
    """

    def __init__(self, compression: str, ranks: int, *, loss_is_scaled: bool = False) -> None:
        """`compression` is 'none' or 'fp16'; the first does not scale."""
        self.is_half = compression == "fp16"
        self._scales = self.is_half and not loss_is_scaled
        self.resize(ranks)
        self._scale = self._first_scale
        self._calm_steps = 0  # since the scale has changed

    def resize(self, ranks: int) -> None:
        """Let the scale grow as high as so many ranks want it."""
        self._first_scale = 2.0 ** (ranks.bit_length() - 1) if self._scales else 1.0

    def scaled(self, values: Tensor) -> Tensor:
        """What is to be sent of gradients."""
        return values * self._scale if self._scales else values

    def unscaled_(self, total: Tensor) -> Tensor:
        """The gradients' sum, of what has come back; in place."""
        return total.div_(self._scale) if self._scales else total

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients of this one travel."""
        if self.is_half:
            return torch.float16
        return torch.float32 if dtype == torch.bfloat16 else dtype

    def pack(self, flat: Tensor, wire_values: Tensor) -> None:
        """Put flat gradients into the tensor that is sent, which may be themselves; they are scaled in place."""
        if self._scales:
            flat.mul_(self._scale)
        if wire_values is not flat:
            wire_values.copy_(flat)

    def unpack(self, wire_values: Tensor, flat: Tensor) -> None:
        """Put the sum that has come back into the flat gradients."""
        if wire_values is not flat:
            flat.copy_(wire_values)
        if self._scales:
            flat.div_(self._scale)

    def end_step(self, *, overflowed: bool) -> None:
        """End a step; `overflowed` is whether the sum was not finite though no rank's forward pass had failed."""
        if not self._scales:
            return
        self._calm_steps = 0 if overflowed else self._calm_steps + 1
        if overflowed:
            self._scale /= 2
        elif self._calm_steps == GROWTH_STEPS:
            self._scale = min(2 * self._scale, self._first_scale)
            self._calm_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The scale, for a checkpoint, if there is one."""
        return {"scale": self._scale, "calm_steps": self._calm_steps} if self._scales else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; from the beginning where what was saved had no scale."""
        if self._scales:
            self._scale, self._calm_steps = state.get("scale", self._first_scale), state.get("calm_steps", 0)
