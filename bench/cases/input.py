"""Speed of images, ours compared with a typical DataLoader: no model, one thread per process, 2 workers.

CIFAR-10's shape: an epoch of a data set on the device (order, noise, crop, flip, normalise) against a DataLoader with
torchvision's transforms; goal: 10 times as fast. JPEGs: our readers against DataLoader(ImageFolder); goal: as fast.
"""

import argparse
import dataclasses
import itertools
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR10, ImageFolder

from bench.pairs import Case, Table, in_turns, middle, ratio
from hvdtrain.core.position import Position
from hvdtrain.loop.feed.feed import Feed
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.vision import images, models
from hvdtrain.tasks.vision.files import image_folder
from hvdtrain.tasks.vision.images import Images
from hvdtrain.tasks.vision.listing import list_images
from hvdtrain.tasks.vision.settings import scaled
from hvdtrain.tasks.vision.task import image_task

WORKERS = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PINNED = DEVICE.type == "cuda"
LOADER: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS, "persistent_workers": True, "pin_memory": PINNED}
OURS, THEIRS = "ours", f"DataLoader, {WORKERS} workers"

Side = tuple[int, Callable[[], None]]  # images per call, and the function to call


class Pictures(CIFAR10):  # type: ignore[misc]
    """Reads random pixels in the way CIFAR10 reads a sample."""

    def __init__(self, count: int, transform: Callable[[Image.Image], Tensor]) -> None:
        random = np.random.default_rng(0)
        self.data = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        self.targets = random.integers(0, 10, count).tolist()
        self.transform, self.target_transform = transform, None


def through(loader: DataLoader[Any]) -> None:
    """Read all batches of a DataLoader, to the device."""
    for batch in loader:
        for tensor in batch:
            tensor.to(DEVICE, non_blocking=True)


def epochs_of(found: Images, batch: int) -> Callable[[], None]:
    """Return a function that reads the next epoch, like a training of the recipe `scaled`."""
    task = image_task(dataclasses.replace(scaled(), data="synthetic"), found, DEVICE)
    steps = -(-len(found.train) // batch)
    sizes = BatchSizes(micro_batch=batch, global_batch=batch, steps_per_epoch=steps)
    feed = Feed(found.train, task, SerialComm(), sizes, seed=0, device=DEVICE)
    numbers = itertools.count()

    def epoch() -> None:
        number = next(numbers)
        for _, parts in feed.micro_batches(feed.batches(Position(epoch=number)), number):
            for _ in parts:
                pass

    return epoch


def resident(batch: int, drawn: int) -> dict[str, Side]:
    """Return CIFAR-10's shape on the device; the DataLoader has `drawn` images a round."""
    found = images.synthetic()
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    to_tensor = [transforms.ToTensor(), transforms.Normalize(found.mean, found.std)]
    pictures = Pictures(drawn, transforms.Compose([*augment, *to_tensor]))
    loader: DataLoader[Any] = DataLoader(pictures, batch, **LOADER)
    return {OURS: (len(found.train), epochs_of(found, batch)), THEIRS: (drawn, partial(through, loader))}


def photograph(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Return an image of large shapes and a little noise."""
    few = random.integers(0, 256, (height // 25, width // 25, 3), dtype=np.uint8)
    smooth: NDArray[Any] = np.asarray(Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(smooth + random.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8))


def make(folder: Path, count: int, width: int = 500) -> None:
    """Write `count` JPEGs of 4:3 for training, in two classes, and one of each for testing."""
    random = np.random.default_rng(0)
    for part, images_of_class in (("train", count // 2), ("val", 1)):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(images_of_class):
                path = folder / part / label / f"{number}.jpg"
                photograph(random, width, width * 3 // 4).save(path, quality=90)


def folders(folder: Path, batch: int) -> dict[str, Side]:
    """Return readers of the JPEGs of a folder."""
    preprocessing = models.preprocessing("efficientnet_b0")
    found = image_folder(list_images(folder), preprocessing, augment=True, seed=0, workers=WORKERS, prefetch=2)
    crop = transforms.RandomResizedCrop(preprocessing.crop, interpolation=preprocessing.interpolation)
    to_tensor = [transforms.ToTensor(), transforms.Normalize(preprocessing.mean, preprocessing.std)]
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *to_tensor])
    loader = DataLoader(ImageFolder(folder / "train", transform), batch, **LOADER)
    count = len(found.train)
    return {OURS: (count, epochs_of(found, batch)), THEIRS: (count, partial(through, loader))}


def rate(side: Side) -> float:
    """Return the images per second."""
    count, go_through = side
    started = time.perf_counter()
    go_through()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def end_workers() -> None:
    """Kill the workers: ours ignore stop requests, as in a run, and torch's handler raises if one is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in active_children():
        worker.kill()


def input_speed(chosen: argparse.Namespace) -> Table:
    """Speed of images without a model: ours compared with a DataLoader, on the device and from JPEGs."""
    torch.set_num_threads(1)
    table = Table(
        name="input",
        question="Images per second without a model, ours and a DataLoader's:",
        columns=["what", "images/s", "theirs", "ratio", "goal"],
        conditions={"JPEGs": chosen.images, "threads per process": 1},
    )
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), chosen.images)
        cases = {f"CIFAR-10's shape on {DEVICE.type}": (resident(256, chosen.drawn), ">= 10")}
        cases["JPEGs"] = (folders(Path(folder), 32), ">= 1.0")
        for what, (sides, goal) in cases.items():
            turns = {name: partial(rate, side) for name, side in sides.items()}
            in_turns(turns, 1)  # starts the workers
            rates = in_turns(turns, chosen.rounds)
            speeds = [round(middle(rates[side]).median) for side in (OURS, THEIRS)]
            table.add(what, *speeds, ratio(rates[OURS], rates[THEIRS]), goal)
        end_workers()
    return table


CASES = {"input": Case(measure=input_speed, options={"rounds": 20, "images": 300, "drawn": 10_240})}
