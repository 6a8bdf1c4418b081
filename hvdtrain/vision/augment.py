"""Random changes to whole batches of images, on whichever device they are.

The noise of a sample depends on seed, epoch and sample alone, so that any number of ranks gets the same images.
N batch, C channels, H W pixels, S samples of the data set.
"""

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

    def of(self, samples: Tensor) -> "Noise":
        """The draws of the samples with these indices."""
        return Noise(shift=self.shift[samples], flip=self.flip[samples], hole=self.hole[samples])


def padding(height: int) -> int:
    """Pixels to pad before a random crop: 4 at 32, in proportion for larger images."""
    return height // 8


def draw_noise(samples: int, *, height: int, seed: int, epoch: int, device: torch.device) -> Noise:
    """All draws of one epoch, drawn on the CPU so that a GPU gets the same ones."""
    random = np.random.default_rng([seed, epoch, _NOISE])
    return Noise(
        shift=torch.from_numpy(random.integers(0, 2 * padding(height) + 1, (samples, 2))).to(device),
        flip=torch.from_numpy(random.random(samples) < 0.5).to(device),
        hole=torch.from_numpy(random.integers(0, height, (samples, 2))).to(device),
    )


def random_crop(images: Tensor, shift: Tensor) -> Tensor:
    """Pad with zeros and crop to the old size at `shift` (N, 2)."""
    batch, _, height, width = images.shape
    padded = F.pad(images, [padding(height)] * 4)
    rows = shift[:, 0, None] + torch.arange(height, device=images.device)  # (N, H)
    columns = shift[:, 1, None] + torch.arange(width, device=images.device)  # (N, W)
    samples = torch.arange(batch, device=images.device)[:, None, None]
    return padded[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # (N, H, W, C) -> (N, C, H, W)


def random_flip(images: Tensor, flip: Tensor) -> Tensor:
    """Mirror the images whose `flip` (N,) is true, left to right."""
    return torch.where(flip[:, None, None, None], images.flip(-1), images)


def cutout(images: Tensor, hole: Tensor, size: int) -> Tensor:
    """Blacken a square of `size` pixels around `hole` (N, 2), clipped at the border (DeVries and Taylor 2017)."""
    height, width = images.shape[2:]
    start = hole - size // 2
    rows = torch.arange(height, device=images.device) - start[:, 0, None]  # (N, H)
    columns = torch.arange(width, device=images.device) - start[:, 1, None]  # (N, W)
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return images.masked_fill(inside[:, None], 0)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (N, C, H, W) to float32 with the channels' `mean` and `std` (C,), both on the scale 0 to 1."""
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]


@dataclass(frozen=True, kw_only=True)
class Augmentations:
    """Those that a run has chosen, in the order in which they are applied."""

    crop: bool = False
    flip: bool = False
    cutout: int = 0  # side in pixels, 0 for none

    def __call__(self, images: Tensor, noise: Noise) -> Tensor:
        """uint8 images (N, C, H, W) changed by the noise of just these samples."""
        if self.crop:
            images = random_crop(images, noise.shift)
        if self.flip:
            images = random_flip(images, noise.flip)
        if self.cutout:
            images = cutout(images, noise.hole, self.cutout)
        return images
