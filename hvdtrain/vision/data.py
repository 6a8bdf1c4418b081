"""The data set of a run by its name: downloaded once per host, checked by all ranks."""

import shutil
import tempfile
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import CIFAR10

from hvdtrain.ranks.agree import agreed, require_equal
from hvdtrain.ranks.comm import Comm, cores_together
from hvdtrain.safety.exits import BadInput
from hvdtrain.vision import images
from hvdtrain.vision.download import giving_up
from hvdtrain.vision.files import image_folder
from hvdtrain.vision.images import Images

NAMES = ("cifar10", "digits", "imagefolder", "synthetic")


def load_on_all(comm: Comm, name: str, folder: Path, *, height: int) -> Images:
    """The data set on every rank, downloaded by one rank of each host while the others wait; see `load`."""
    agreed(comm, lambda: fetch(name, folder) if comm.local_rank == 0 else None)
    workers = max(1, cores_together(comm.local_size) // comm.local_size)
    found = agreed(comm, lambda: load(name, folder, height=height, rank=comm.rank, size=comm.size, workers=workers))
    require_equal(comm, {"the number of training images": len(found.train)})
    return found


def load(name: str, folder: Path, *, height: int, rank: int, size: int, workers: int) -> Images:
    """Read a data set; `height` is the size to decode an image folder to, whose files the ranks check together.

    Raises BadInput for an unknown name and for a missing or corrupt folder, naming the file.
    """
    if name == "cifar10":
        return images.cifar10(folder)
    if name == "digits":
        return images.digits()
    if name == "imagefolder":
        return image_folder(folder, height=height, rank=rank, size=size, workers=workers)
    if name == "synthetic":
        return images.synthetic()
    raise BadInput(f"--data {name!r} is unknown: choose one of {', '.join(NAMES)}")


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
                f"CIFAR-10 is not in {folder} and cannot be downloaded ({reason}): put {CIFAR10.base_folder}/ there, "
                "or try --data digits, which needs no download"
            ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
