"""Images of a folder, decoded by workers or by the rank. N images of a batch, H W pixels, S of a split."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as TF

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.task import Batch
from hvdtrain.loop.feed.readers import Readers
from hvdtrain.settings.safety.guard import Guard
from hvdtrain.tasks.vision.images import NO_LABEL, Images
from hvdtrain.tasks.vision.listing import Listing
from hvdtrain.tasks.vision.preprocessing import Preprocessing

# Pillow's exceptions for unreadable files, by format: RuntimeError for AVIF and DDS.
BROKEN = (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError)
_BITS = (8, 10, 12, 14, 16)  # of cameras and scanners, whose values are stored in 16 or 32 bits
_FLOAT_TOPS = (1.0, 255.0)
_GUARD = Guard()  # of this process, a rank or its loader worker


def image_folder(
    listing: Listing, preprocessing: Preprocessing, *, augment: bool, seed: int, workers: int, prefetch: int
) -> Images:
    """Return the splits of a folder, read by one pool of workers, each of which prefetches `prefetch` batches.

    `augment` crops a random part of each training image.
    """
    readers = Readers(
        Decoded(listing, preprocessing, seed),
        functools.partial(_collate, height=preprocessing.crop),
        workers=workers,
        prefetch=prefetch,
    )
    train, test = listing.splits
    return Images(
        train=ImageFiles(train, readers, augment=augment),
        test=ImageFiles(test, readers, augment=False),
        classes=listing.classes,
        height=preprocessing.crop,
        mean=preprocessing.mean,
        std=preprocessing.std,
        is_mirrorable=True,
        is_cropped=True,
    )


def decode(path: str) -> Tensor:
    """Decode an image file to RGB, uint8 (3, H, W); raise BROKEN if it cannot be read completely.

    The result equals Pillow's, bit for bit, except for pictures of more than 8 bits per channel: see `to_rgb`. JPEGs
    are decoded by torchvision: the same library (libjpeg-turbo) with less overhead.
    """
    with Image.open(path) as file:  # reads only the header, and rejects files that are not images, or too large
        pixels: Tensor
        if file.format == "JPEG":
            with suppress(RuntimeError):  # if it is damaged, Pillow reads on, or reports the error
                pixels = decode_jpeg(torch.from_numpy(np.fromfile(path, np.uint8)), mode=ImageReadMode.RGB)
                return pixels
        pixels = TF.pil_to_tensor(to_rgb(file))
        return pixels


def may_have_no_range(file: Image.Image) -> bool:
    """Whether `to_rgb` may reject the opened file by its values: 32-bit integers and floats."""
    return file.mode in ("I", "F") and file.format != "PPM"


def to_rgb(file: Image.Image) -> Image.Image:
    """Convert to 8 bits per channel, by the range of the format, or by that of the values if the format has none.

    White is 2**bits - 1 for the fewest usual bits that hold all values of a picture; for floats 1, or 255 if a value is
    greater. Raises ValueError for values without such a range: negative, too large, not finite.
    """
    has_wide_channels = any(";16" in str(tile.args) for tile in getattr(file, "tile", ()))
    if file.mode == "F" or file.mode.startswith("I"):
        grey = np.asarray(file)  # (H, W)
        white = 65535 if file.format == "PPM" and file.mode != "F" else _white(grey)  # Pillow has scaled a PGM
        shades = np.rint(grey.astype(np.float32) * (255 / white)).astype(np.uint8)
        if getattr(file, "tag_v2", {}).get(PHOTOMETRIC_INTERPRETATION) == 0:  # white is 0, as on X-ray film
            shades = 255 - shades
        return Image.fromarray(shades).convert("RGB")
    rgb = file.convert("RGB")
    if has_wide_channels and 0 < max(high for _, high in rgb.getextrema()) < 16:  # type: ignore[misc]
        raise ValueError("has 16 bits per channel, and uses 12 or fewer: all would be black. Save it with 8 bits")
    return rgb


def _white(grey: NDArray[np.generic]) -> float:
    lowest, highest = grey.min(), grey.max()
    tops = _FLOAT_TOPS if grey.dtype.kind == "f" else [2**bits - 1 for bits in _BITS]
    for top in tops:
        if lowest >= 0 and highest <= top:
            return top
    raise ValueError(f"has values from {lowest} to {highest}, not 0 to {tops[0]} or {tops[-1]}. Save it with 8 bits")


class Decoded(Dataset[tuple[Tensor, int]]):
    """Image files as (3, H, H) uint8, by number and epoch: a random part in an epoch, the middle without one.

    An image that cannot be decoded is black with label NO_LABEL, so that all ranks continue with equal numbers of
    steps.
    """

    def __init__(self, listing: Listing, preprocessing: Preprocessing, seed: int) -> None:
        self.listing = listing
        self.preprocessing = preprocessing
        self.seed = seed

    def __getitem__(self, keys: tuple[int, int | None]) -> tuple[Tensor, int]:
        number, epoch = keys
        path = self.listing.path(number)
        try:
            pixels = decode(path)
        except BROKEN as error:
            _GUARD.note("decoding of an image", path, error)
            side = self.preprocessing.crop
            return torch.zeros(3, side, side, dtype=torch.uint8), NO_LABEL
        label = int(self.listing.labels[number])
        if epoch is None:
            return self.preprocessing.crop_middle(pixels), label
        return self.preprocessing.crop_randomly(pixels, seed=self.seed, epoch=epoch, sample=number), label


def _collate(samples: list[tuple[Tensor, int]], *, height: int) -> Batch:
    """Collate a batch; it is empty if a rank has no images of a small last batch."""
    images = torch.empty(len(samples), 3, height, height, dtype=torch.uint8)
    for place, (image, _) in zip(images, samples, strict=True):
        place.copy_(image)
    return {"images": images, "labels": torch.tensor([label for _, label in samples], dtype=torch.int64)}


class ImageFiles:
    """A split of image files."""

    reads_files = True
    content: str | None = None

    def __init__(self, numbers: Tensor, readers: Readers, *, augment: bool) -> None:
        """Create the split; `numbers` (S,) are its images in the readers' listing."""
        self.readers = readers.processes
        self.numbers = numbers
        self._readers = readers
        self._augment = augment

    def __len__(self) -> int:
        return len(self.numbers)

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        epoch = epoch if self._augment else None

        def keys(samples: Tensor) -> list[tuple[int, int | None]]:
            return [(number, epoch) for number in self.numbers[samples].tolist()]

        yield from self._readers.read(indices, keys, device, phases)
