"""An image folder, decoded by worker processes. N images of a batch, H W pixels."""

import ctypes
import functools
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional as TF

from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.guard import Guard
from hvdtrain.timing.phases import OFF, Phases
from hvdtrain.train.feed import prefetched
from hvdtrain.train.task import Batch
from hvdtrain.vision.images import NO_LABEL, Images, eighty_twenty

# What Pillow raises for files that it cannot read, by format.
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GUARD = Guard()  # of this process, a loader worker
_IMAGENET_MEAN = (0.485, 0.456, 0.406)  # torchvision's own, for its pretrained weights
_IMAGENET_STD = (0.229, 0.224, 0.225)


def image_folder(folder: Path, *, height: int, rank: int, size: int, workers: int) -> Images:
    """FOLDER/train/CLASS/* and FOLDER/val/CLASS/*, or FOLDER/CLASS/* with a fixed split 80/20."""
    parts = [folder / "train", folder / "val"] if (folder / "train").is_dir() else [folder]
    try:
        found = [ImageFolder(part) for part in parts]
    except OSError as error:
        raise BadInput(f"--data-dir {folder}: not a folder of class folders with images ({error})") from error
    if found[0].classes != found[-1].classes:
        different = sorted(set(found[0].classes) ^ set(found[-1].classes))
        raise BadInput(f"--data-dir {folder}: class {different[0]!r} is in only one of train/ and val/")
    mine = [path for part in found for path, _ in part.samples][rank::size]
    with ThreadPoolExecutor(16) as pool:
        broken = [complaint for complaint in pool.map(_header_complaint, mine) if complaint]
    if broken:
        raise BadInput(f"--data-dir {folder}: {broken[0]}; remove or replace it")
    if len(found) == 2:
        train, test = found[0].samples, found[1].samples
    else:
        samples = found[0].samples
        train, test = ([samples[index] for index in part.tolist()] for part in eighty_twenty(len(samples)))
    return Images(
        train=Folder(train, height=height, workers=workers),
        test=Folder(test, height=height, workers=workers),
        classes=len(found[0].classes),
        height=height,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        mirror=True,
    )


def _header_complaint(path: str) -> str | None:
    try:
        with Image.open(path):
            return None
    except _BROKEN:
        return f"{path} is not a readable image"


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Image files as (3, H, H) uint8: shorter side resized, centre cut out.

    One that cannot be decoded is black and has the label NO_LABEL, so that all ranks go on with the same steps.
    """

    def __init__(self, samples: list[tuple[str, int]], height: int) -> None:
        self.samples = samples
        self.height = height

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        try:
            with Image.open(path) as image:
                pixels = TF.pil_to_tensor(image.convert("RGB"))
        except _BROKEN as error:
            _GUARD.note("decoding of an image", path, error)
            return torch.zeros(3, self.height, self.height, dtype=torch.uint8), NO_LABEL
        resized = TF.resize(pixels, [self.height], antialias=True)
        return TF.center_crop(resized, [self.height]), label


def _collated(samples: list[tuple[Tensor, int]], *, height: int) -> Batch:
    """A batch; empty where a rank has no images of a small last one."""
    images = torch.empty(len(samples), 3, height, height, dtype=torch.uint8)
    for place, (image, _) in zip(images, samples, strict=True):
        place.copy_(image)
    return {"images": images, "labels": torch.tensor([label for _, label in samples], dtype=torch.int64)}


class _Plan:
    """The index lists of the epoch at hand, read anew at each epoch by a DataLoader whose workers stay."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def _die_with_rank(_worker: int) -> None:
    """Ask the kernel to end this worker when its rank ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Folder:
    """A split of image files, decoded by worker processes."""

    reads_files = True

    def __init__(self, samples: list[tuple[str, int]], *, height: int, workers: int) -> None:
        self.samples = samples
        self._plan = _Plan()
        # spawn: a process that has started MPI or CUDA must not be forked, and a fork server would outlive its rank.
        self._loader = DataLoader(
            _Decoded(samples, height),
            batch_sampler=self._plan,
            collate_fn=functools.partial(_collated, height=height),
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=True,
            multiprocessing_context="spawn",
            worker_init_fn=_die_with_rank,
            generator=torch.Generator(),  # not the model's: a resumed epoch begins twice
        )

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, indices: Sequence[Tensor], device: torch.device, phases: Phases = OFF) -> Iterator[Batch]:
        self._plan.lists = [samples.tolist() for samples in indices]
        # mpirun sends what asks a rank to save and leave to its workers as well, and a terminal Ctrl-C.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGINT})
        arriving = iter(self._loader)  # the first one starts the workers, which inherit the mask
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if device.type != "cuda":
            yield from arriving
        else:
            yield from prefetched(arriving, device, phases)
