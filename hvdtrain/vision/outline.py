"""Data sets of images by shape only, for a dry run: nothing is downloaded, and no image is read."""

import torch

from hvdtrain.costs.samples import BlankSplit
from hvdtrain.feed.feed import Resident
from hvdtrain.vision import models
from hvdtrain.vision.images import Images, digits
from hvdtrain.vision.listing import list_images, require_classes
from hvdtrain.vision.settings import EffnetSettings

_IMAGENET = {"classes": 1000, "train": 1_281_167, "test": 50_000}


def outline(settings: EffnetSettings) -> Images:
    """Return the data set of the settings; a missing folder of images is replaced by ImageNet's shapes."""
    if settings.data == "digits":
        return digits()
    if settings.data != "imagefolder":
        return _images(_cifar(50_000), _cifar(10_000), classes=10, height=32, is_cropped=False)
    crop = models.preprocessing(settings.model).crop
    sizes, source = _IMAGENET, "ImageNet's numbers of images and classes"
    if settings.data_dir.is_dir():
        listing = require_classes(list_images(settings.data_dir))
        train, test = map(len, listing.splits)
        sizes, source = {"classes": listing.classes, "train": train, "test": test}, f"those of {settings.data_dir}"
    shapes = {"images": ((3, crop, crop), torch.uint8), "labels": ((), torch.int64)}
    splits = (
        BlankSplit(sizes[name], shapes, assumed=f"images of {crop} x {crop} pixels, {source}")
        for name in ("train", "test")
    )
    return _images(*splits, classes=sizes["classes"], height=crop, is_cropped=True)


def _cifar(count: int) -> Resident:
    """Return CIFAR-10's shapes; the values are never read."""
    return Resident(
        images=torch.empty((count, 3, 32, 32), dtype=torch.uint8), labels=torch.zeros(count, dtype=torch.int64)
    )


def _images(
    train: Resident | BlankSplit, test: Resident | BlankSplit, *, classes: int, height: int, is_cropped: bool
) -> Images:
    return Images(
        train=train,
        test=test,
        classes=classes,
        height=height,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        is_mirrorable=True,
        is_cropped=is_cropped,
    )
