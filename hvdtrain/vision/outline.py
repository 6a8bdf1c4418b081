"""Data sets of images by shape only, for a dry run: nothing is downloaded, and no image is read."""

import torch

from hvdtrain.costs.samples import BlankSplit
from hvdtrain.feed.feed import Resident
from hvdtrain.vision import models
from hvdtrain.vision.images import Images, digits
from hvdtrain.vision.listing import list_images, require_classes
from hvdtrain.vision.settings import EffnetSettings

_IMAGENET = (1000, 1_281_167, 50_000)  # classes, images for training and for the test


def outline(settings: EffnetSettings) -> Images:
    """Return the data set of the settings; a missing folder of images is replaced by ImageNet's shapes."""
    if settings.data == "digits":
        return digits()
    splits: list[Resident] | list[BlankSplit]
    is_folder = settings.data == "imagefolder"
    if is_folder:
        height = models.preprocessing(settings.model).crop
        (classes, *counts), source = _IMAGENET, "ImageNet's numbers of images and classes"
        if settings.data_dir.is_dir():
            listing = require_classes(list_images(settings.data_dir))
            classes, counts, source = listing.classes, [*map(len, listing.splits)], f"those of {settings.data_dir}"
        assumed = f"images of {height} x {height} pixels, {source}"
        shapes = {"images": ((3, height, height), torch.uint8), "labels": ((), torch.int64)}
        splits = [BlankSplit(count, shapes, assumed=assumed) for count in counts]
    else:  # CIFAR-10's shapes; the values are never read
        classes, height = 10, 32
        splits = [
            Resident(images=torch.empty((count, 3, 32, 32), dtype=torch.uint8), labels=torch.zeros(count).long())
            for count in (50_000, 10_000)
        ]
    return Images(
        train=splits[0],
        test=splits[1],
        classes=classes,
        height=height,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        is_mirrorable=True,
        is_cropped=is_folder,
    )
