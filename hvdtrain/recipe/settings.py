"""Settings for the optimizer and the schedule."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.recipe.optimizers import OPTIMIZERS
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.notes import AT_LEAST_0, COLUMN, POSITIVE, SHAPES, Column, one_of


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(BatchSettings):
    """Optimizer, learning rate schedule and regularization."""

    title: ClassVar[str] = "optimizer and schedule"

    optimizer: Annotated[str, one_of(OPTIMIZERS), SHAPES, COLUMN] = "sgd"
    """sgd, rmsprop, adam, adamw, lars or lamb."""
    lr: Annotated[float | None, POSITIVE, Column(value="peak_lr", first=True)] = None
    """Peak learning rate for a global batch of 256; the optimizer's default if not given."""
    scale_lr: bool = True
    """Scale the learning rate with the global batch: linear for sgd, rmsprop and lars, square root for adam, adamw and
    lamb.
    """
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up: falls to nearly 0 at the last step, or stays constant."""
    warmup_epochs: Annotated[float | None, AT_LEAST_0] = 5.0
    """Epochs of linear warm-up to the peak learning rate; at most half of the run."""
    weight_decay: Annotated[float, AT_LEAST_0] = 5e-4
    """Decay of the weights at each step; norms and biases do not decay."""
    decay_all: Annotated[bool, SHAPES] = False
    """Decay norms and biases, too."""
    ema_epochs: Annotated[float, AT_LEAST_0] = 2.0
    """Memory in epochs of the moving average of the weights that is evaluated; 0 evaluates the weights themselves."""
    clip_value: Annotated[float | None, POSITIVE] = None
    """Maximum absolute value of a gradient element."""
    clip_norm: Annotated[float | None, POSITIVE] = None
    """Maximum norm of all gradients together, applied after clip-value."""

    def uses(self) -> Iterable[Use]:
        if OPTIMIZERS[self.optimizer].layerwise:
            yield Use(option=f"--optimizer {self.optimizer}", needs=(Capability.NORMS,))
