"""Properties of optimizers that the settings need; recipe/optim.py builds the optimizers."""

from dataclasses import dataclass
from typing import Literal


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
