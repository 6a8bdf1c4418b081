"""Data sets of images that fit on the device. S images of a split, uint8 (S, 3, H, W), H W pixels."""

from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity

from hvdtrain.loop.feed.feed import Resident, Split
from hvdtrain.settings.safety.exits import BadInput

NO_LABEL = -100  # of an undecodable image: cross_entropy's ignore_index
_TEST_SHARE = 5
_SPLIT_SEED = 20230613  # of the fixed 80/20 splits; arbitrary, but never changed


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set and the properties of its images."""

    train: Split
    test: Split
    classes: int
    height: int  # pixels; images are square
    mean: tuple[float, ...]  # per channel, on the scale 0 to 1
    std: tuple[float, ...]
    is_mirrorable: bool  # whether a mirrored image keeps its label
    is_cropped: bool = False  # whether training images are already cropped at random when they are read


def cifar10(folder: Path) -> Images:
    """Load CIFAR-10 from its downloaded files; BadInput if a file is missing or corrupt."""
    for file, md5 in (*CIFAR10.train_list, *CIFAR10.test_list, [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]):
        path = folder / CIFAR10.base_folder / file
        if not check_integrity(path, md5):
            state = "corrupt (its MD5 is wrong)" if path.exists() else "missing"
            raise BadInput(f"--data-dir {folder}: {path} is {state}. Delete {path.parent} to download it again.")
    splits = [CIFAR10(folder, train=train) for train in (True, False)]
    train, test = (
        Resident(
            images=torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), labels=torch.tensor(split.targets)
        )
        for split in splits
    )
    return _resident(train, test, classes=10, is_mirrorable=True)


def digits() -> Images:
    """scikit-learn's 1,797 handwritten digits, enlarged to CIFAR-10's shape."""
    # The file of sklearn.datasets.load_digits; importing scikit-learn takes longer than an epoch.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(str(file), delimiter=",", dtype=np.uint8))  # (S, 65)
    pixels = table[:, :64].reshape(-1, 1, 8, 8).float() / 16  # (S, 1, 8, 8), 0 to 1; the last column is the label
    large = F.interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    images = (large * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = table[:, 64].long()
    train, test = split_eighty_twenty(len(labels))
    return _resident(
        Resident(images=images[train], labels=labels[train]),
        Resident(images=images[test], labels=labels[test]),
        classes=10,
        is_mirrorable=False,
    )


def synthetic() -> Images:
    """CIFAR-10's shape with random pixels and labels, so that speed can be measured without a download."""
    random = torch.Generator().manual_seed(0)
    train, test = (
        Resident(
            images=torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=random),
            labels=torch.randint(0, 10, (count,), generator=random),
        )
        for count in (50_000, 10_000)
    )
    return _resident(train, test, classes=10, is_mirrorable=True)


def split_eighty_twenty(samples: int) -> tuple[Tensor, Tensor]:
    """Return a fixed split: indices for training and for testing."""
    order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(samples))
    cut = round(samples * 0.8)
    return order[:cut], order[cut:]


def split_by_label(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a fixed split of samples (S,): indices for training, and for testing a fifth of each label, at least one.

    A label with a single sample is trained only.
    """
    order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(len(labels)))
    order, counts = order[labels[order].argsort(stable=True)], labels.bincount()
    places = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]  # of a sample in its label
    is_test = places % _TEST_SHARE == 1
    return order[~is_test], order[is_test]


def _resident(train: Resident, test: Resident, *, classes: int, is_mirrorable: bool) -> Images:
    pixels = train.tensors["images"]
    mean, std = _channel_statistics(pixels)
    return Images(
        train=train,
        test=test,
        classes=classes,
        height=pixels.shape[-1],
        mean=mean,
        std=std,
        is_mirrorable=is_mirrorable,
    )


def _channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each channel, 0 to 1, without a float copy of (S, C, H, W) uint8."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        weights = torch.bincount(channel.flatten(), minlength=256) / channel.numel()
        mean = (weights * values).sum()
        means.append(mean.item())
        deviations.append((weights * (values - mean) ** 2).sum().sqrt().item())
    return tuple(means), tuple(deviations)
