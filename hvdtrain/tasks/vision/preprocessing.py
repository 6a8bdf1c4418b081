"""Converts an image file's pixels to the model's input size. H W pixels."""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

_CROP = 2  # separates this random stream from those of the noise and the permutation
# As in torchvision's RandomResizedCrop, after Szegedy et al. 2014.
_AREA = (0.08, 1.0)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS = 10
_THIN = 32  # times as long as wide


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """The preprocessing with which a model's weights were evaluated: torchvision's `weights.transforms()`."""

    resize: int  # the shorter side, pixels
    crop: int  # the side of the central square, pixels
    interpolation: InterpolationMode
    mean: tuple[float, ...]  # per channel, on the scale 0 to 1
    std: tuple[float, ...]

    def crop_middle(self, pixels: Tensor) -> Tensor:
        """Resize and crop the middle, from uint8 (3, H, W) to (3, H, H).

        The result equals the input of the normalisation in `weights.transforms()`, bit for bit, or nearly if one side
        is more than 32 times as long as the other.
        """
        # A thin image loses its ends first: 1 x 5,000 pixels would become 256 x 1,280,000.
        most = _THIN * min(pixels.shape[1:])
        top, left = (max(0, (side - most) // 2) for side in pixels.shape[1:])
        pixels = pixels[:, top : pixels.shape[1] - top, left : pixels.shape[2] - left]
        image = TF.to_pil_image(pixels)  # Pillow and torch resize differently; the weights expect Pillow
        resized = TF.resize(image, [self.resize], interpolation=self.interpolation)
        middle: Tensor = TF.pil_to_tensor(TF.center_crop(resized, [self.crop]))
        return middle

    def crop_randomly(self, pixels: Tensor, *, seed: int, epoch: int, sample: int) -> Tensor:
        """Crop like torchvision's RandomResizedCrop, uint8 (3, H, W) to (3, H, H), by seed, epoch and sample only."""
        random = np.random.default_rng([seed, epoch, _CROP, sample])
        box = random_box(pixels.shape[1], pixels.shape[2], random)
        # On a tensor, in two thirds of Pillow's time; they differ by at most 2 of 255.
        part: Tensor = TF.resized_crop(
            pixels, *box, [self.crop, self.crop], interpolation=self.interpolation, antialias=True
        )
        return part


def random_box(height: int, width: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a part with 8 to 100 % of the area and sides of 3:4 to 4:3.

    After ten draws that do not fit, use the middle of the image: torchvision's RandomResizedCrop.get_params.
    """
    for _ in range(_ATTEMPTS):
        area = height * width * random.uniform(*_AREA)
        ratio = math.exp(random.uniform(*_LOG_RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(height - h + 1)), int(random.integers(width - w + 1)), h, w
    narrowest, widest = (math.exp(log) for log in _LOG_RATIO)
    h = min(height, round(width / narrowest))
    w = min(width, round(height * widest))
    return (height - h) // 2, (width - w) // 2, h, w
