"""The data set of a run by its name: downloaded once per host, checked by all ranks."""

import shutil
import tempfile
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import CIFAR10

from hvdtrain.ranks.agree import agreed, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.cores import cores_together
from hvdtrain.safety.exits import BadInput
from hvdtrain.vision import images, models
from hvdtrain.vision.config import DATA, EffnetConfig
from hvdtrain.vision.download import giving_up
from hvdtrain.vision.files import image_folder
from hvdtrain.vision.headers import require_readable
from hvdtrain.vision.images import Images
from hvdtrain.vision.listing import listed, require_classes

# On any number of ranks up to 64.
OFFLINE = "python -m hvdtrain.effnet --data digits --model efficientnet_tiny --global-batch-size 64"


def load_on_all(comm: Comm, config: EffnetConfig) -> Images:
    """The data set on every rank, downloaded by one rank of each host while the others wait; see `load`."""
    name, folder = config.data, config.data_dir
    agreed(comm, lambda: fetch(name, folder) if comm.local_rank == 0 else None)
    if name == "imagefolder":
        return folder_on_all(comm, config)
    found = agreed(comm, lambda: load(name, folder))
    require_equal(comm, {"the number of training images": len(found.train)})
    return found


def folder_on_all(comm: Comm, config: EffnetConfig) -> Images:
    """A folder of images on every rank; BadInput for a missing one, one class, or too many unreadable images."""
    listing = agreed(comm, lambda: require_classes(listed(config.data_dir)))
    require_equal(comm, {"the numbers of training and test images": [len(split) for split in listing.splits]})
    require_readable(comm, listing, epochs=config.epochs, most=config.max_unreadable_images)
    return image_folder(
        listing,
        models.preprocessing(config.model),
        augment=config.augment,
        seed=config.seed,
        workers=readers(comm, config),
        prefetch=config.prefetch,
    )


def readers(comm: Comm, config: EffnetConfig) -> int:
    """The processes that read files for this rank; 0 for data that fit on the device, or if it reads by itself."""
    if config.data != "imagefolder" or not config.prefetch:
        return 0
    if config.workers is not None:
        return config.workers
    return max(1, cores_together(comm.local_size) // comm.local_size)


def load(name: str, folder: Path) -> Images:
    """Read a data set that fits into memory.

    Raises BadInput for an unknown name and for a missing or corrupt folder, naming the file.
    """
    if name == "cifar10":
        return images.cifar10(folder)
    if name == "digits":
        return images.digits()
    if name == "synthetic":
        return images.synthetic()
    raise BadInput(f"--data {name!r} is unknown: choose one of {', '.join(DATA)}")


def fetch(name: str, folder: Path) -> None:
    """Download what is missing (CIFAR-10 only), whole or not at all; called by one rank of each host."""
    if name != "cifar10" or (folder / CIFAR10.base_folder).is_dir():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".cifar10-", dir=folder))
    except OSError as error:
        raise BadInput(f"--data-dir {folder}: cannot be written ({error.strerror}); name another folder") from error
    try:
        with giving_up():
            CIFAR10(beside, download=True)
        (beside / CIFAR10.base_folder).rename(folder / CIFAR10.base_folder)
    except (OSError, RuntimeError, HTTPException) as error:
        if not (folder / CIFAR10.base_folder).is_dir():  # else another host was faster
            reason = " ".join(str(error).split())
            raise BadInput(
                f"--data-dir {folder}: CIFAR-10 is missing and cannot be downloaded ({reason}). Put "
                f"{CIFAR10.base_folder}/ there, or train without a download: {OFFLINE}"
            ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
