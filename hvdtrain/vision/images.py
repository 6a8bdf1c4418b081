"""Data sets, and which images each rank sees at each step.

Images are uint8 (N, 3, H, W) until they are on the device. What fits stays there; an image folder is decoded by
worker processes and copied on a stream of its own. N images of a batch, S of a split, H W pixels.
"""

import ctypes
import functools
import math
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import distribution
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.utils import check_integrity
from torchvision.transforms.v2 import functional as TF

from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.guard import Guard
from hvdtrain.timing.phases import OFF, Phases
from hvdtrain.vision.download import giving_up

NAMES = ("cifar10", "digits", "imagefolder", "synthetic")
UNREADABLE = -100  # the label of an image that could not be decoded: cross_entropy's ignore_index

_PERMUTATION = 0  # keeps this random stream apart from the noise's, see augment.draw_noise
# What Pillow raises for files that it cannot read, by format.
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GUARD = Guard()  # of this process, a loader worker
_SPLIT_SEED = 20230613  # of the fixed 80/20 splits; any number, but always this one
_IMAGENET_MEAN = (0.485, 0.456, 0.406)  # torchvision's own, for its pretrained weights
_IMAGENET_STD = (0.229, 0.224, 0.225)


class Split(Protocol):
    """One split of a data set."""

    def __len__(self) -> int: ...

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, phases: Phases = OFF
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each (N,) index tensor: images (N, 3, H, W) uint8 and labels (N,) int64, on the device."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set with what its pictures need."""

    train: Split
    test: Split
    classes: int
    height: int  # pixels; images are square
    mean: tuple[float, ...]  # per channel, on the scale 0 to 1
    std: tuple[float, ...]
    mirror: bool  # whether a mirrored image keeps its label


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of one global batch."""

    samples: Tensor  # (N,) indices into the split; N differs by at most one between ranks
    global_count: int  # images of the global batch


def permutation(samples: int, *, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples; the same on every rank and for every number of ranks."""
    return torch.from_numpy(np.random.default_rng([seed, epoch, _PERMUTATION]).permutation(samples))


def share(count: int, rank: int, size: int) -> slice:
    """The rank's contiguous part of `count` things; parts differ by at most one."""
    return slice(count * rank // size, count * (rank + 1) // size)


def rank_batches(order: Tensor, *, global_batch: int, rank: int, size: int) -> list[RankBatch]:
    """Cut an epoch's order into global batches, the last maybe smaller, and each into the ranks' parts."""
    return [
        RankBatch(samples=batch[share(len(batch), rank, size)], global_count=len(batch))
        for batch in pieces(order, global_batch)
    ]


def passes(global_count: int, *, size: int, micro_batch: int) -> int:
    """How many micro-batches it takes to bring a global batch through the model; the same on all ranks."""
    return math.ceil(math.ceil(global_count / size) / micro_batch)


def pieces(samples: Tensor, size: int) -> list[Tensor]:
    """Cut indices (N,) into pieces of at most `size`; none where there are no samples."""
    return list(samples.split(size)) if len(samples) else []


class Resident:
    """A split that lives on the device."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images  # (S, 3, H, W) uint8
        self.labels = labels  # (S,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, phases: Phases = OFF
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if self.images.device != device:
            self.images, self.labels = self.images.to(device), self.labels.to(device)
        for one in indices:
            phases.enter("to_device")
            chosen = one.to(device)
            phases.enter("read")
            yield self.images[chosen], self.labels[chosen]


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Image files as (3, H, H) uint8: shorter side resized, centre cut out.

    One that cannot be decoded is black and has the label UNREADABLE, so that all ranks go on with the same steps.
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
            return torch.zeros(3, self.height, self.height, dtype=torch.uint8), UNREADABLE
        resized = TF.resize(pixels, [self.height], antialias=True)
        return TF.center_crop(resized, [self.height]), label


def _collated(samples: list[tuple[Tensor, int]], *, height: int) -> tuple[Tensor, Tensor]:
    """A batch; empty where a rank has no images of a small last one."""
    images = torch.empty(len(samples), 3, height, height, dtype=torch.uint8)
    for place, (image, _) in zip(images, samples, strict=True):
        place.copy_(image)
    return images, torch.tensor([label for _, label in samples], dtype=torch.int64)


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

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, phases: Phases = OFF
    ) -> Iterator[tuple[Tensor, Tensor]]:
        self._plan.lists = [one.tolist() for one in indices]
        # mpirun sends what asks a rank to save and leave to its workers as well, and a terminal Ctrl-C.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGINT})
        arriving = iter(self._loader)  # the first one starts the workers, which inherit the mask
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if device.type != "cuda":
            yield from arriving
        else:
            yield from _prefetched(arriving, device, phases)


def _prefetched(
    batches: Iterable[tuple[Tensor, Tensor]], device: torch.device, phases: Phases = OFF
) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy each batch to the GPU on a stream of its own while the one before is being used."""
    stream = torch.cuda.Stream(device)
    ready: list[Tensor] = []
    for images, labels in batches:
        phases.enter("to_device")
        with torch.cuda.stream(stream):
            arriving = [images.to(device, non_blocking=True), labels.to(device, non_blocking=True)]
        if ready:
            yield ready[0], ready[1]
            phases.enter("to_device")
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in arriving:
            tensor.record_stream(torch.cuda.current_stream(device))
        ready = arriving
        phases.enter("read")
    if ready:
        yield ready[0], ready[1]


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


def load(name: str, folder: Path, *, height: int, rank: int, size: int, workers: int) -> Images:
    """Read a data set; `height` is the size to decode an image folder to, whose files the ranks check together.

    Raises BadInput for an unknown name and for a missing or corrupt folder, naming the file.
    """
    if name == "cifar10":
        return _cifar10(folder)
    if name == "digits":
        return _digits()
    if name == "imagefolder":
        return _image_folder(folder, height=height, rank=rank, size=size, workers=workers)
    if name == "synthetic":
        return _synthetic()
    raise BadInput(f"--data {name!r} is unknown: choose one of {', '.join(NAMES)}")


def _cifar10(folder: Path) -> Images:
    for file, md5 in (*CIFAR10.train_list, *CIFAR10.test_list, [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]):
        path = folder / CIFAR10.base_folder / file
        if not check_integrity(path, md5):
            state = "corrupt (its MD5 is wrong)" if path.exists() else "missing"
            raise BadInput(f"--data-dir {folder}: {path} is {state}; delete {path.parent} to download it again")
    splits = [CIFAR10(folder, train=train) for train in (True, False)]
    train, test = (
        Resident(torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets))
        for split in splits
    )
    return _resident(train, test, classes=10, mirror=True)


def _digits() -> Images:
    # What sklearn.datasets.load_digits reads; to import scikit-learn takes longer than an epoch.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(str(file), delimiter=",", dtype=np.uint8))  # (S, 65)
    pixels = table[:, :64].reshape(-1, 1, 8, 8).float() / 16  # (S, 1, 8, 8), 0 to 1; the last column is the label
    large = F.interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    images = (large * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = table[:, 64].long()
    train, test = _eighty_twenty(len(labels))
    return _resident(
        Resident(images[train], labels[train]), Resident(images[test], labels[test]), classes=10, mirror=False
    )


def _synthetic() -> Images:
    """CIFAR-10's shape with random pixels and labels, so that speed can be measured without a download."""
    random = torch.Generator().manual_seed(0)
    train, test = (
        Resident(
            torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=random),
            torch.randint(0, 10, (count,), generator=random),
        )
        for count in (50_000, 10_000)
    )
    return _resident(train, test, classes=10, mirror=True)


def _image_folder(folder: Path, *, height: int, rank: int, size: int, workers: int) -> Images:
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
        train, test = ([samples[index] for index in part.tolist()] for part in _eighty_twenty(len(samples)))
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


def _eighty_twenty(samples: int) -> tuple[Tensor, Tensor]:
    order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(samples))
    cut = round(samples * 0.8)
    return order[:cut], order[cut:]


def _resident(train: Resident, test: Resident, *, classes: int, mirror: bool) -> Images:
    mean, std = _channel_statistics(train.images)
    return Images(
        train=train,
        test=test,
        classes=classes,
        height=train.images.shape[-1],
        mean=mean,
        std=std,
        mirror=mirror,
    )


def _channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, 0 to 1, counted so that no float copy of (S, C, H, W) uint8 is made."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        weights = torch.bincount(channel.flatten(), minlength=256) / channel.numel()
        mean = (weights * values).sum()
        means.append(mean.item())
        deviations.append((weights * (values - mean) ** 2).sum().sqrt().item())
    return tuple(means), tuple(deviations)
