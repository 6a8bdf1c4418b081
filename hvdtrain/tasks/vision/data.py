"""The data set of a run by its name: downloaded once per host, verified by all ranks."""

import shutil
import tempfile
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

import torch
from torchvision.datasets import CIFAR10

from hvdtrain.insight.costs.samples import BlankSplit
from hvdtrain.loop.feed.feed import Resident
from hvdtrain.loop.feed.readers import count_workers
from hvdtrain.program.checks import saved_config
from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput, print_message
from hvdtrain.tasks.vision import images, models
from hvdtrain.tasks.vision.files import image_folder
from hvdtrain.tasks.vision.headers import require_readable
from hvdtrain.tasks.vision.images import Images, digits
from hvdtrain.tasks.vision.listing import list_images, require_classes
from hvdtrain.tasks.vision.models import socket_timeout
from hvdtrain.tasks.vision.settings import OFFLINE_COMMAND, EffnetSettings, unreadable_limit

_IMAGENET = (1000, 1_281_167, 50_000)  # classes, images for training and for the test
SMALL_PIXELS = 32  # maximum height for which the stem keeps the resolution


def load_on_all(comm: Comm, config: EffnetSettings) -> Images:
    """Load the data set on every rank; one rank of each host downloads it while the others wait; see `load`."""
    if config.dry_run:
        return agree(comm, lambda: outline(config))
    name, folder = config.data, config.data_dir
    agree(comm, lambda: fetch(name, folder) if comm.local_rank == 0 else None)
    if name == "imagefolder":
        return load_folder_on_all(comm, config)
    data_set = agree(comm, lambda: load(name, folder))
    require_equal(comm, {"the number of training images": len(data_set.train)})
    return data_set


def with_choices(comm: Comm, settings: EffnetSettings, images: Images) -> EffnetSettings:
    """Set what the program chooses for these images, or what a resumed run has chosen."""
    saved = comm.allgather(saved_config(settings).get("stem_stride"))[0]
    is_small = images.height <= SMALL_PIXELS and settings.pretrained != "hub"  # trained on halved images
    return replace(
        settings,
        stem_stride=settings.stem_stride or saved or (1 if is_small else 2),
        max_unreadable_images=unreadable_limit(settings, len(images.train)),
        pretrained=None if settings.dry_run else settings.pretrained,  # the values of weights do not affect the cost
    )


def load_folder_on_all(comm: Comm, config: EffnetSettings) -> Images:
    """Load a folder of images on every rank; BadInput if missing, with one class, or too many unreadable images."""
    listing = agree(comm, lambda: require_classes(list_images(config.data_dir)))
    require_equal(comm, {"the numbers of training and test images": [len(split) for split in listing.splits]})
    most = unreadable_limit(config, len(listing.splits[0]))
    require_readable(comm, listing, epochs=config.epochs, max_unreadable=most)
    if comm.rank == 0:
        print_message("note", listing.usage)
    return image_folder(
        listing,
        models.preprocessing(config.model),
        augment=config.augment != "none",
        seed=config.seed,
        workers=count_workers(config, comm),
        prefetch=config.prefetch,
    )


def load(name: str, folder: Path) -> Images:
    """Read a data set that fits into memory; BadInput names a file that is missing or corrupt."""
    if name == "cifar10":
        return images.cifar10(folder)
    return images.digits() if name == "digits" else images.synthetic()


def fetch(name: str, folder: Path) -> None:
    """Download what is missing (CIFAR-10 only), atomically; called by one rank of each host."""
    if name != "cifar10" or (folder / CIFAR10.base_folder).is_dir():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part_folder = Path(tempfile.mkdtemp(prefix=".cifar10-", dir=folder))
    except OSError as error:
        raise BadInput(f"--data-dir {folder}: cannot be written ({error.strerror}). Choose another folder.") from error
    try:
        with socket_timeout():
            CIFAR10(part_folder, download=True)
        (part_folder / CIFAR10.base_folder).rename(folder / CIFAR10.base_folder)
    except (OSError, RuntimeError, HTTPException) as error:
        if not (folder / CIFAR10.base_folder).is_dir():  # else another host was faster
            reason = " ".join(str(error).split())
            raise BadInput(
                f"--data-dir {folder}: CIFAR-10 is missing and cannot be downloaded ({reason}). Put "
                f"{CIFAR10.base_folder}/ there, or train without a download: {OFFLINE_COMMAND}"
            ) from error
    finally:
        shutil.rmtree(part_folder, ignore_errors=True)


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
