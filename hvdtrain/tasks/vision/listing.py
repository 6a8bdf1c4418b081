"""The images of a folder by name. S images of all splits together."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hvdtrain.insight.tracking.console import ItemCount, counted
from hvdtrain.loop.feed.split_names import quoted, usage_line
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision.images import split_by_label
from hvdtrain.tasks.vision.layout import IMAGE_ENDINGS, class_folders, find_layout, walk


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A list of images, as tensors: these move into shared memory when torch sends them to loader workers."""

    folder: Path
    classes: int
    names: Tensor  # bytes (uint8): the paths below the folder, each terminated by a zero byte
    ends: Tensor  # (S,) positions of these zero bytes
    labels: Tensor  # (S,)
    splits: tuple[Tensor, Tensor]  # indexes of the S images for training and for testing
    usage: str  # which files are for training and which for testing, in a line

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, image: int) -> str:
        """Return the file of an image."""
        start = int(self.ends[image - 1]) + 1 if image else 0
        name = self.names[start : int(self.ends[image])].numpy().tobytes()
        return f"{self.folder}/{os.fsdecode(name)}"


def list_images(folder: Path) -> Listing:
    """List the images of two splits, or of class folders with a fixed fifth of each for testing.

    Classes and images are in the order of torchvision's ImageFolder. Raises BadInput if there are none.
    """
    try:
        layout = find_layout(folder)
        parts = [layout.train] if layout.test is None else [layout.train, layout.test]
        classes = [class_folders(part) for part in parts]
        paths = [_images_of(part, names, folder, layout.unused) for part, names in zip(parts, classes, strict=True)]
    except OSError as error:
        raise BadInput(
            f"--data-dir {folder}: not a folder of class folders with images ({error}). Pass one."
        ) from error
    if classes[0] != classes[-1]:
        different = sorted(set(classes[0]) ^ set(classes[-1]))
        raise BadInput(
            f"--data-dir {folder}: class {different[0]!r} is in only one of {_below(folder, parts[0])} and "
            f"{_below(folder, parts[-1])}. Add it to the other, or remove it."
        )
    names = bytearray().join(text for by_class in paths for text in by_class)
    counts = [[text.count(0) for text in by_class] for by_class in paths]
    images = torch.arange(sum(map(sum, counts)))
    labels = torch.cat([torch.arange(len(part)).repeat_interleave(torch.tensor(part)) for part in counts])
    split = split_by_label(labels) if len(parts) == 1 else images.split([*map(sum, counts)])
    shown = [f"{_below(folder, part)} ({sum(count):,} images" for part, count in zip(parts, counts, strict=True)]
    return Listing(
        folder=folder,
        classes=len(classes[0]),
        names=torch.frombuffer(names, dtype=torch.uint8),
        ends=torch.from_numpy(np.flatnonzero(np.frombuffer(names, dtype=np.uint8) == 0)),
        labels=labels,
        splits=(split[0], split[1]),
        usage=usage_line(
            folder,
            f"{shown[0]} of {quoted(classes[0])})",
            f"{shown[1]})" if layout.test else f"a fifth of these ({len(split[1]):,} images)",
            used=len(images),
            unused=layout.unused,
        ),
    )


def require_classes(listing: Listing) -> Listing:
    """Return the listing; BadInput if its training images have fewer than two classes, so that any guess is right."""
    if len(listing.labels[listing.splits[0]].unique()) < 2:
        raise BadInput(
            f"--data-dir {listing.folder}: all training images are in one class folder. "
            "Name a folder with two or more class folders."
        )
    return listing


def _below(folder: Path, part: Path) -> str:
    """Name a folder as seen from `folder`."""
    return f"{os.path.relpath(part, folder)}/"


def _images_of(part: Path, classes: Sequence[str], folder: Path, unused: Counter[str]) -> list[bytes]:
    """Return each class's image paths below `folder`, each terminated by a zero byte."""
    paths = []
    for name in counted(classes, ItemCount(f"listing {part.name}", len(classes))):
        text = b""
        for subfolder, images in walk(part / name, part, unused):
            relative = os.path.relpath(subfolder, folder)
            text += os.fsencode("".join(f"{relative}/{file}\0" for file in images))
        paths.append(text)
    empty = [name for name, text in zip(classes, paths, strict=True) if not text]
    if empty or not classes:
        known = ", ".join(IMAGE_ENDINGS)
        raise FileNotFoundError(f"Found no image in {part} for the classes {', '.join(empty)}; images are {known}")
    return paths
