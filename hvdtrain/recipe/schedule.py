"""The learning rate of every step, as a pure function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hvdtrain.recipe.settings import OPTIMIZERS, OptimizerSettings

REFERENCE_BATCH = 256

Scaling = Literal["linear", "sqrt"] | None  # None: the same rate for every batch


def scaled_lr(base: float, *, scaling: Scaling, batch: float, reference: float = REFERENCE_BATCH) -> float:
    """Scale `base`, the learning rate for a global batch of `reference`, to a global batch of `batch` samples."""
    if scaling is None:
        return base
    factor = batch / reference
    return base * (factor if scaling == "linear" else math.sqrt(factor))


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then constant, or a cosine or line down to nearly zero at the last step."""

    peak: float  # for a batch of `batch` samples
    batch: float  # mean size of an epoch's batches
    scaling: Scaling  # dependence of the rate on the batch size
    warmup_steps: int
    total_steps: int
    shape: Literal["cosine", "linear", "constant"]
    own: Callable[[float], float] | None = None  # of the program, replaces warm-up and shape
    by_steps: bool = False  # whether the length is fixed in steps (--max-steps) and not in epochs

    def __call__(self, step: float, samples: float) -> float:
        """Return the rate of step 0, 1, ... total_steps - 1, or between two steps, for a global batch of `samples`."""
        return scaled_lr(self.peak * self._share(step), scaling=self.scaling, batch=samples, reference=self.batch)

    def _share(self, step: float) -> float:
        """Return the rate as a share of the peak."""
        if self.own is not None:
            return self.own(min(1.0, step / self.total_steps))
        if step < self.warmup_steps:
            return min(1.0, (step + 1) / self.warmup_steps)
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        if self.shape == "linear":
            return 1 - done
        return 0.5 * (1 + math.cos(math.pi * done))


def learning_rate(
    config: OptimizerSettings,
    *,
    samples: int,
    steps_per_epoch: int,
    max_steps: int | None = None,
    own_peak: float | None = None,
    own: Callable[[float], float] | None = None,
) -> LearningRate:
    """Return the schedule of a run on `samples` training samples, with its peak scaled to the batches if set so.

    It ends with the last epoch, or after `max_steps`. `own_peak` is the rate of a program's own optimizer, the same for
    every batch, and `own` its schedule.
    """
    kind = OPTIMIZERS[config.optimizer]
    batch = samples / steps_per_epoch
    scaling = kind.scaling if config.scale_lr and own_peak is None else None
    assert config.warmup_epochs is not None  # the script has set a number
    total_steps = max_steps or config.epochs * steps_per_epoch
    warmup_steps = round(min(config.warmup_epochs * steps_per_epoch, total_steps / 2))
    return LearningRate(
        peak=own_peak or scaled_lr(kind.base_lr if config.lr is None else config.lr, scaling=scaling, batch=batch),
        batch=batch,
        scaling=scaling,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        shape=config.schedule,
        own=own,
        by_steps=max_steps is not None,
    )
