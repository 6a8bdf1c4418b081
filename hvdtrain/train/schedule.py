"""The learning rate of every step, as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

REFERENCE_BATCH = 256
_LINEAR = ("sgd", "rmsprop", "lars")


def scaled_lr(base: float, *, optimizer: str, global_batch: int) -> float:
    """The learning rate for `global_batch` images, from `base` for 256.

    Linear in the batch for SGD and RMSProp (Goyal et al. 2017) and LARS (You, Gitman and Ginsburg 2017), the square
    root for Adam and AdamW (Malladi et al. 2022) and LAMB (You et al. 2020).
    """
    factor = global_batch / REFERENCE_BATCH
    return base * (factor if optimizer in _LINEAR else math.sqrt(factor))


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then constant, or a cosine down to nearly zero at the last step."""

    peak: float
    warmup_steps: int
    total_steps: int
    shape: Literal["cosine", "constant"]

    def __call__(self, step: float) -> float:
        """The rate of step 0, 1, ... total_steps - 1, or between two of them."""
        if step < self.warmup_steps:
            return self.peak * min(1.0, (step + 1) / self.warmup_steps)
        if self.shape == "constant":
            return self.peak
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.peak * 0.5 * (1 + math.cos(math.pi * done))
