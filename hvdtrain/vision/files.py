"""The images of a folder, decoded by worker processes or the rank. N images of a batch, H W pixels, S of a split."""

import ctypes
import functools
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as TF

from hvdtrain.core.feed import copied, prefetched
from hvdtrain.core.task import Batch
from hvdtrain.profiling.phases import OFF, Phases
from hvdtrain.safety.exits import STOPS
from hvdtrain.safety.guard import Guard
from hvdtrain.vision.headers import BROKEN
from hvdtrain.vision.images import NO_LABEL, Images
from hvdtrain.vision.listing import Listing
from hvdtrain.vision.preprocessing import Preprocessing

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGCHLD_S = 5.0  # by then the kernel has told that a worker is dead
_GUARD = Guard()  # of this process, a rank or its loader worker


def image_folder(
    listing: Listing, preprocessing: Preprocessing, *, augment: bool, seed: int, workers: int, prefetch: int
) -> Images:
    """The images of a folder, read by one pool of workers, each of which is `prefetch` batches ahead.

    `augment` cuts a random part out of each image to train on.
    """
    readers = Readers(listing, preprocessing, seed=seed, workers=workers, prefetch=prefetch)
    train, test = listing.splits
    return Images(
        train=Folder(train, readers, augment=augment),
        test=Folder(test, readers, augment=False),
        classes=listing.classes,
        height=preprocessing.crop,
        mean=preprocessing.mean,
        std=preprocessing.std,
        mirror=True,
        cropped=True,
    )


def decoded(path: str) -> Tensor:
    """An image file's pixels in RGB, uint8 (3, H, W); BROKEN where it cannot be read, or not as a whole.

    Pillow's, bit for bit. A JPEG is decoded by torchvision: the same library (libjpeg-turbo), with less around it.
    """
    with Image.open(path) as file:  # reads the header alone, and refuses what is no image, or too large
        pixels: Tensor
        if file.format == "JPEG":
            with suppress(RuntimeError):  # it is damaged: Pillow reads on, or says what is wrong with it
                pixels = decode_jpeg(torch.from_numpy(np.fromfile(path, np.uint8)), mode=ImageReadMode.RGB)
                return pixels
        pixels = TF.pil_to_tensor(file.convert("RGB"))
        return pixels


class _Decoded(Dataset[tuple[Tensor, int]]):
    """By number and epoch image files as (3, H, H) uint8: a random part of it in an epoch, without one its middle.

    One that cannot be decoded is black and has the label NO_LABEL, so that all ranks go on with the same steps.
    """

    def __init__(self, listing: Listing, preprocessing: Preprocessing, seed: int) -> None:
        self.listing = listing
        self.preprocessing = preprocessing
        self.seed = seed

    def __getitem__(self, wanted: tuple[int, int | None]) -> tuple[Tensor, int]:
        number, epoch = wanted
        path = self.listing.path(number)
        try:
            pixels = decoded(path)
        except BROKEN as error:
            _GUARD.note("decoding of an image", path, error)
            side = self.preprocessing.crop
            return torch.zeros(3, side, side, dtype=torch.uint8), NO_LABEL
        label = int(self.listing.labels[number])
        if epoch is None:
            return self.preprocessing.middle(pixels), label
        return self.preprocessing.random_part(pixels, seed=self.seed, epoch=epoch, sample=number), label


def _collated(samples: list[tuple[Tensor, int]], *, height: int) -> Batch:
    """A batch; empty where a rank has no images of a small last one."""
    images = torch.empty(len(samples), 3, height, height, dtype=torch.uint8)
    for place, (image, _) in zip(images, samples, strict=True):
        place.copy_(image)
    return {"images": images, "labels": torch.tensor([label for _, label in samples], dtype=torch.int64)}


class _Plan:
    """What is to be read now, asked for anew at each epoch and evaluation by a DataLoader whose workers stay."""

    def __init__(self) -> None:
        self.batches: Sequence[Tensor] = ()
        self.numbers = torch.empty(0, dtype=torch.int64)  # of a split's images in the listing
        self.epoch: int | None = None

    def __iter__(self) -> Iterator[list[tuple[int, int | None]]]:
        for samples in self.batches:
            yield [(number, self.epoch) for number in self.numbers[samples].tolist()]

    def __len__(self) -> int:
        return len(self.batches)


def _die_with_rank(_worker: int) -> None:
    """Ask the kernel to end this worker when its rank ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started now never get what asks a rank to leave, which may still save.

    A terminal, timeout(1) and mpirun send it to all processes of a group. The start of Python's resource tracker
    unblocks SIGINT and SIGTERM, so it comes first; it ignores both itself.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _received(arriving: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; if a worker dies as it hands one over, torch's handler of SIGCHLD tells which one, and of what."""
    try:
        yield from arriving
    except (ConnectionError, EOFError):
        time.sleep(_SIGCHLD_S)  # that handler raises in here
        raise


class Readers:
    """A rank's worker processes, for all splits in turn: whoever reads next ends the reading before.

    Without workers, or where nothing is read ahead, the rank reads by itself, the same images.
    """

    def __init__(
        self, listing: Listing, preprocessing: Preprocessing, *, seed: int, workers: int, prefetch: int
    ) -> None:
        self._plan = _Plan()
        self._ahead = prefetch > 0
        self._has_workers = workers > 0 and prefetch > 0
        self._images = _Decoded(listing, preprocessing, seed)
        self._stream: torch.cuda.Stream | None = None  # of the copies to the device
        processes: dict[str, Any] = {}
        if self._has_workers:
            processes = {
                "num_workers": workers,
                "prefetch_factor": prefetch,
                "persistent_workers": True,
                # A process that has started MPI or CUDA must not be forked; a fork server would outlive its rank.
                "multiprocessing_context": "spawn",
                "worker_init_fn": _die_with_rank,
            }
        self._loader = DataLoader(
            self._images,
            batch_sampler=self._plan,
            collate_fn=functools.partial(_collated, height=preprocessing.crop),
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # not the model's: a resumed epoch begins twice
            **processes,
        )

    def read(
        self, numbers: Tensor, batches: Sequence[Tensor], epoch: int | None, device: torch.device, phases: Phases
    ) -> Iterator[Batch]:
        """The images with these of a split's `numbers` (S,) in the listing, each of `batches` (N,) on the device."""
        self._plan.numbers, self._plan.batches, self._plan.epoch = numbers, batches, epoch
        if phases.alone:
            return copied(map(self._read_here, self._plan), device, phases)
        with _deaf() if self._has_workers else nullcontext():
            arriving = _received(iter(self._loader))  # the first one starts the workers
        if device.type != "cuda":
            return arriving
        if not self._ahead:
            return copied(arriving, device, phases)
        self._stream = self._stream or torch.cuda.Stream(device)
        return prefetched(arriving, device, self._stream, phases)

    def _read_here(self, wanted: Sequence[tuple[int, int | None]]) -> Batch:
        """A batch that no worker has read."""
        return _collated([self._images[one] for one in wanted], height=self._images.preprocessing.crop)


class Folder:
    """A split of image files."""

    reads_files = True

    def __init__(self, numbers: Tensor, readers: Readers, *, augment: bool) -> None:
        """`numbers` (S,) are its images in the readers' listing."""
        self.numbers = numbers
        self._readers = readers
        self._augment = augment

    def __len__(self) -> int:
        return len(self.numbers)

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        yield from self._readers.read(self.numbers, indices, epoch if self._augment else None, device, phases)
