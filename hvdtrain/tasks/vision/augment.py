"""Random changes to whole batches of images, on any device.

The noise of a sample depends only on seed, epoch and sample, so that any number of ranks gets identical images. N
batch, C channels, H W pixels, S samples of the data set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_NOISE = 1  # separates this random stream from the permutation's


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The random draws of one epoch for every sample of a data set."""

    shift: Tensor  # (S, 2) rows and columns, 0 to twice the padding
    flip: Tensor  # (S,) bool
    hole: Tensor  # (S, 2) centre of the cut-out, pixels

    def select(self, samples: Tensor) -> "Noise":
        """The draws of the samples with these indices."""
        return Noise(shift=self.shift[samples], flip=self.flip[samples], hole=self.hole[samples])


def padding(height: int) -> int:
    """Pixels to pad before a random crop: 4 at 32, in proportion for larger images."""
    return height // 8


def draw_noise(samples: int, *, height: int, seed: int, epoch: int, device: torch.device) -> Noise:
    """Draw the noise of one epoch, on the CPU so that a GPU gets the same values."""
    random = np.random.default_rng([seed, epoch, _NOISE])
    return Noise(
        shift=torch.from_numpy(random.integers(0, 2 * padding(height) + 1, (samples, 2))).to(device),
        flip=torch.from_numpy(random.random(samples) < 0.5).to(device),
        hole=torch.from_numpy(random.integers(0, height, (samples, 2))).to(device),
    )


def crop_and_flip(images: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
    """Pad with zeros and crop to the old size at `shift` (N, 2), then mirror left to right if `flip` (N,) is true.

    None leaves a step out. Both are done in a single gather of pixels, on a CPU four times as fast as two gathers.
    """
    batch, channels, height, width = images.shape
    rows, columns = (torch.arange(side, device=images.device)[None] for side in (height, width))
    if flip is not None:
        columns = torch.where(flip[:, None], width - 1 - columns, columns)  # (N, W)
    if shift is not None:
        images = F.pad(images, [padding(height)] * 4)
        rows = shift[:, 0, None] + rows  # (N, H)
        columns = shift[:, 1, None] + columns  # (N, W)
    pixels = rows[:, :, None] * images.shape[-1] + columns[:, None, :]  # (N, H, W)
    indices = pixels.flatten(1)[:, None].expand(batch, channels, -1)
    return images.flatten(2).gather(2, indices).view(batch, channels, height, width)


def cutout(images: Tensor, hole: Tensor, size: int) -> Tensor:
    """Blacken a square of `size` pixels around `hole` (N, 2), clipped at the border (DeVries and Taylor 2017)."""
    height, width = images.shape[2:]
    start = hole - size // 2
    rows = torch.arange(height, device=images.device) - start[:, 0, None]  # (N, H)
    columns = torch.arange(width, device=images.device) - start[:, 1, None]  # (N, W)
    in_hole = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return images.masked_fill(in_hole[:, None], 0)


def scale_and_shift(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset of `normalise`, from the channels' mean and deviation on the scale 0 to 1."""
    means, deviations = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return (1 / (255 * deviations)).float().to(device), (-means / deviations).float().to(device)


def normalise(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 (N, C, H, W) to float32 in two passes, by the (C, 1, 1) of `scale_and_shift`."""
    return (images * scale).add_(shift)


@dataclass(frozen=True, kw_only=True)
class Augmentations:
    """The augmentations of a run, in order of application."""

    crop: bool = False
    flip: bool = False
    cutout: int = 0  # side in pixels, 0 for none

    def __call__(self, images: Tensor, noise: Noise) -> Tensor:
        """Change uint8 images (N, C, H, W) by the noise of exactly these samples."""
        if self.crop or self.flip:
            images = crop_and_flip(images, noise.shift if self.crop else None, noise.flip if self.flip else None)
        if self.cutout:
            images = cutout(images, noise.hole, self.cutout)
        return images
