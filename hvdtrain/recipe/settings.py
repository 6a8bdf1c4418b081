"""Optimizer and schedule."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.recipe.optimizers import OPTIMIZERS
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.notes import AT_LEAST_0, COLUMN, POSITIVE, SHAPES, Column, one_of


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(BatchSettings):
    """How the weights learn from their gradients."""

    title: ClassVar[str] = "optimizer and schedule"

    optimizer: Annotated[str, one_of(OPTIMIZERS), SHAPES, COLUMN] = "sgd"
    """sgd, rmsprop, adam, adamw, lars or lamb."""
    lr: Annotated[float | None, POSITIVE, Column(value="peak_lr", first=True)] = None
    """For a global batch of 256; the optimizer's usual one if not given."""
    scale_lr: bool = True
    """Follow the global batch: linear for sgd, rmsprop and lars, square root for adam, adamw and lamb."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up: to nearly 0 at the last step, or not at all."""
    warmup_epochs: Annotated[float | None, AT_LEAST_0] = 5.0
    """Epochs in which the learning rate rises to its peak; at most half of the run."""
    weight_decay: Annotated[float, AT_LEAST_0] = 5e-4
    """Of the weights, at each step; norms and biases do not decay."""
    decay_all: Annotated[bool, SHAPES] = False
    """Decay norms and biases as well."""
    ema_epochs: Annotated[float, AT_LEAST_0] = 2.0
    """Memory of the moving average of the weights that is evaluated; 0 evaluates the weights themselves."""
    clip_value: Annotated[float | None, POSITIVE] = None
    """Largest absolute value of a gradient element."""
    clip_norm: Annotated[float | None, POSITIVE] = None
    """Largest norm of all gradients together, after clip-value."""

    def uses(self) -> Iterable[Use]:
        if OPTIMIZERS[self.optimizer].layerwise:
            yield Use(option=f"--optimizer {self.optimizer}", needs=(Capability.NORMS,))
