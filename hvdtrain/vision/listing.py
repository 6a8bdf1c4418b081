"""The images of a folder by name. S images of all splits together."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

from hvdtrain.safety.exits import BadInput, launched_rank
from hvdtrain.tracking.console import progress
from hvdtrain.vision.images import eighty_twenty


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Which images there are, in tensors: these move into shared memory when torch sends them to loader workers."""

    folder: Path
    classes: int
    names: Tensor  # bytes (uint8): the paths below the folder, each with a zero byte at its end
    ends: Tensor  # (S,) where these zero bytes are
    labels: Tensor  # (S,)
    splits: tuple[Tensor, Tensor]  # which of the S images are for training, and which for the test
    key: str  # another one once an image was added, removed or renamed, or replaced by renaming

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, image: int) -> str:
        """The file of an image."""
        begin = int(self.ends[image - 1]) + 1 if image else 0
        name = self.names[begin : int(self.ends[image])].numpy().tobytes()
        return f"{self.folder}/{os.fsdecode(name)}"


def listed(folder: Path) -> Listing:
    """FOLDER/train/CLASS/* and FOLDER/val/CLASS/*, or FOLDER/CLASS/* with a fixed split 80/20.

    Classes and images in the order of torchvision's ImageFolder. BadInput where there are none.
    """
    try:
        parts = [folder / "train", folder / "val"] if (folder / "train").is_dir() else [folder]
        classes = [find_classes(part)[0] for part in parts]
        found = [_images_of(part, names, folder=folder) for part, names in zip(parts, classes, strict=True)]
    except OSError as error:
        raise BadInput(f"--data-dir {folder}: not a folder of class folders with images ({error})") from error
    if classes[0] != classes[-1]:
        different = sorted(set(classes[0]) ^ set(classes[-1]))
        raise BadInput(f"--data-dir {folder}: class {different[0]!r} is in only one of train/ and val/")
    names = bytearray().join(text for of_part in found for text, _ in of_part)
    changed = [when for of_part in found for _, when in of_part]
    counts = [[text.count(0) for text, _ in of_part] for of_part in found]  # per class
    images = torch.arange(sum(map(sum, counts)))
    split = eighty_twenty(len(images)) if len(parts) == 1 else images.split([sum(of_part) for of_part in counts])
    return Listing(
        folder=folder,
        classes=len(classes[0]),
        names=torch.frombuffer(names, dtype=torch.uint8),
        ends=torch.from_numpy(np.flatnonzero(np.frombuffer(names, dtype=np.uint8) == 0)),
        labels=torch.cat([torch.arange(len(of_part)).repeat_interleave(torch.tensor(of_part)) for of_part in counts]),
        splits=(split[0], split[1]),
        key=hashlib.sha256(repr(changed).encode() + names).hexdigest(),
    )


def require_classes(listing: Listing) -> Listing:
    """The same listing; BadInput if its training images are of fewer than two classes, so that any guess is right."""
    if len(listing.labels[listing.splits[0]].unique()) < 2:
        raise BadInput(
            f"--data-dir {listing.folder}: all training images are in one class folder. "
            "Name a folder with two or more class folders."
        )
    return listing


def _images_of(part: Path, classes: Sequence[str], *, folder: Path) -> list[tuple[bytes, list[int]]]:
    """Of each class its images' paths below `folder`, and when the folders that they are in were changed, in ns."""
    found = []
    shown = launched_rank() == 0
    for name in progress(classes, shown=shown, what=f"listing {part.name}", unit="class", total=len(classes)):
        text, changed = b"", []
        for below, _, files in sorted(os.walk(part / name, followlinks=True)):
            where = os.path.relpath(below, folder)
            images = sorted(file for file in files if file.lower().endswith(IMG_EXTENSIONS))
            text += os.fsencode("".join(f"{where}/{file}\0" for file in images))
            changed.append(Path(below).stat().st_mtime_ns)
        found.append((text, changed))
    empty = [name for name, (text, _) in zip(classes, found, strict=True) if not text]
    if empty:
        known = ", ".join(IMG_EXTENSIONS)
        raise FileNotFoundError(f"Found no image in {part} for the classes {', '.join(empty)}; images are {known}")
    return found
