"""The learning rate of every step, as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

from hvdtrain.train.optim import OPTIMIZERS
from hvdtrain.train.options import RunConfig

REFERENCE_BATCH = 256


def scaled_lr(base: float, *, scaling: Literal["linear", "sqrt"], global_batch: int) -> float:
    """The learning rate for `global_batch` samples, from `base` for 256."""
    factor = global_batch / REFERENCE_BATCH
    return base * (factor if scaling == "linear" else math.sqrt(factor))


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


def learning_rate(config: RunConfig, *, global_batch: int, steps_per_epoch: int) -> LearningRate:
    """The schedule of a run, its peak scaled to the global batch if the settings say so."""
    kind = OPTIMIZERS[config.optimizer]
    peak = kind.base_lr if config.lr is None else config.lr
    if config.scale_lr:
        peak = scaled_lr(peak, scaling=kind.scaling, global_batch=global_batch)
    return LearningRate(
        peak=peak,
        warmup_steps=round(min(config.warmup_epochs, config.epochs / 2) * steps_per_epoch),
        total_steps=config.epochs * steps_per_epoch,
        shape=config.schedule,
    )
