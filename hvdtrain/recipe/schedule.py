"""The learning rate of every step, as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

from hvdtrain.recipe.optimizers import OPTIMIZERS
from hvdtrain.recipe.settings import OptimizerSettings

REFERENCE_BATCH = 256

Scaling = Literal["linear", "sqrt"] | None  # None: the same rate for every batch


def scaled_lr(base: float, *, scaling: Scaling, batch: float, reference: float = REFERENCE_BATCH) -> float:
    """The learning rate for a global batch of `batch` samples, from `base` for one of `reference`."""
    if scaling is None:
        return base
    factor = batch / reference
    return base * (factor if scaling == "linear" else math.sqrt(factor))


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then constant, or down to nearly zero at the last step: a cosine, or a line."""

    peak: float  # for a batch of `batch` samples
    batch: float  # mean size of an epoch's batches
    scaling: Scaling  # how the rate follows a batch of another size
    warmup_steps: int
    total_steps: int
    shape: Literal["cosine", "linear", "constant"]
    by_steps: bool = False  # of a run of so many steps, however many epochs they are; else epochs give the place

    def __call__(self, step: float, samples: float) -> float:
        """The rate of step 0, 1, ... total_steps - 1, or between two of them, with a global batch of `samples`."""
        return scaled_lr(self.peak * self._share(step), scaling=self.scaling, batch=samples, reference=self.batch)

    def _share(self, step: float) -> float:
        """Of the peak."""
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
    before: LearningRate | None = None,
) -> LearningRate:
    """The schedule of a run on `samples` training samples, its peak scaled to the batches if the settings say so.

    It ends with the last epoch, or after `max_steps`: then its warm-up stays as many steps as it was `before`, with
    other batches.
    """
    kind = OPTIMIZERS[config.optimizer]
    batch = samples / steps_per_epoch
    scaling = kind.scaling if config.scale_lr else None
    assert config.warmup_epochs is not None  # the script has made it a number
    total_steps = max_steps or config.epochs * steps_per_epoch
    warmup_steps = round(min(config.warmup_epochs * steps_per_epoch, total_steps / 2))
    if max_steps is not None and before is not None:
        warmup_steps = before.warmup_steps
    return LearningRate(
        peak=scaled_lr(kind.base_lr if config.lr is None else config.lr, scaling=scaling, batch=batch),
        batch=batch,
        scaling=scaling,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        shape=config.schedule,
        by_steps=max_steps is not None,
    )
