"""Settings for the optimizer and the schedule; recipe/optim.py builds the optimizers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.notes import AT_LEAST_0, COLUMN, POSITIVE, SHAPES, Auto, Column, one_of


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer that can be selected by name."""

    base_lr: float  # for a global batch of 256, if --lr is not given
    scaling: Literal["linear", "sqrt"]  # of the rate with the global batch, see schedule.scaled_lr
    layerwise: bool = False  # uses the norms of single layers' gradients


# Rates: sgd He et al. 2016; rmsprop Tan and Le 2019 (0.256 at 4096); adam and adamw torch's default; lars You, Gitman
# and Ginsburg 2017 (32 at 32,768, rounded up); lamb You et al. 2020 (0.005 at 512 for ResNet-50, by its square-root
# rule). Scaling: linear for SGD and RMSProp (Goyal et al. 2017) and LARS (You, Gitman and Ginsburg 2017), the square
# root for Adam and AdamW (Malladi et al. 2022) and LAMB (You et al. 2020).
OPTIMIZERS = {
    "sgd": Kind(base_lr=0.1, scaling="linear"),
    "rmsprop": Kind(base_lr=0.016, scaling="linear"),
    "adam": Kind(base_lr=1e-3, scaling="sqrt"),
    "adamw": Kind(base_lr=1e-3, scaling="sqrt"),
    "lars": Kind(base_lr=0.25, scaling="linear", layerwise=True),
    "lamb": Kind(base_lr=3.5e-3, scaling="sqrt", layerwise=True),
}


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
    decay_all: Annotated[
        bool, SHAPES, Auto(why="the recipe chooses: --recipe book of effnet decays all parameters")
    ] = False
    """Decay norms and biases, too."""
    ema_epochs: Annotated[float, AT_LEAST_0] = 2.0
    """Memory in epochs of the moving average of the weights that is evaluated; 0 evaluates the weights themselves."""
    clip_value: Annotated[float | None, POSITIVE] = None
    """Maximum absolute value of a gradient element."""
    clip_norm: Annotated[float | None, AT_LEAST_0] = None
    """Maximum norm of all gradients together, applied after clip-value; 0 for none."""

    def uses(self) -> Iterable[Use]:
        if OPTIMIZERS[self.optimizer].layerwise:
            yield Use(option=f"--optimizer {self.optimizer}", needs=(Capability.NORMS,))
