"""How fast images come, ours against what a user would write instead: no model, one thread per process.

    python bench/input.py --rounds 20

- CIFAR-10's shape: the epoch of a data set on the device (order, noise, crop, flip, normalise; one process) against a
  DataLoader with torchvision's transforms and 2 workers. Goal: 10 times as fast.
- A folder of JPEGs: our readers against DataLoader(ImageFolder(...)), the same transforms and workers, by the clock and
  by the seconds that all processes compute. Goal: as fast.
- Decoders of these JPEGs, one after the other in one process. PyTurboJPEG only where it and its library are installed.
"""

import argparse
import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pairs import Table, in_turns, middle, ratio
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file

from hvdtrain.core.position import Position
from hvdtrain.feed.feed import Feed, Resident
from hvdtrain.feed.order import BatchSizes
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.vision import images, models
from hvdtrain.vision.files import decode, image_folder
from hvdtrain.vision.images import Images
from hvdtrain.vision.listing import list_images
from hvdtrain.vision.settings import scaled
from hvdtrain.vision.task import image_task

WORKERS = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TABLE = Table(
    name="input",
    question="How fast do images come, without a model?",
    columns=["what", "images/s", "against", "its images/s", "ratio", "goal"],
)


class Meter:
    """Images per second of variants in turns, and per second that all processes compute."""

    def __init__(self) -> None:
        self.by_clock: dict[str, list[float]] = {}
        self.by_core: dict[str, list[float]] = {}

    def measure(self, variants: dict[str, tuple[int, Callable[[], Any]]], rounds: int) -> None:
        """By name how many images a call yields, and the call; each is called once before, and then in turns."""

        def rate(name: str) -> float:
            count, run = variants[name]
            started, computed = time.perf_counter(), computed_s()
            run()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - started
            self.by_core.setdefault(name, []).append(count / max(computed_s() - computed, 1e-9))
            return count / took

        for name in variants:
            rate(name)
        self.by_core.clear()
        self.by_clock = in_turns({name: partial(rate, name) for name in variants}, rounds)


def computed_s() -> float:
    """Seconds that this process and its workers have computed."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def add(what: str, measured: dict[str, list[float]], ours: str, theirs: str, goal: str = "-") -> None:
    """One row of the table."""
    TABLE.add(
        what=what,
        **{"images/s": f"{middle(measured[ours]).median:.4g}"},
        against=theirs,
        **{"its images/s": f"{middle(measured[theirs]).median:.4g}"},
        ratio=ratio(measured[ours], measured[theirs]),
        goal=goal,
    )


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images in memory, as torchvision's CIFAR10 hands them out."""

    def __init__(self, found: Resident, transform: Callable[[Image.Image], Tensor]) -> None:
        self.pixels = found.tensors["images"].permute(0, 2, 3, 1).numpy()  # (S, H, W, 3)
        self.labels = found.tensors["labels"].tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def through(loader: Iterable[list[Tensor]]) -> None:
    """All batches of a DataLoader, on the device."""
    for batch in loader:
        for tensor in batch:
            tensor.to(DEVICE, non_blocking=True)


def epochs_of(found: Images, batch: int) -> Callable[[], None]:
    """A function that goes through the next epoch, as a training of the recipe `scaled` is fed."""
    task = image_task(dataclasses.replace(scaled(), data="synthetic"), found, DEVICE)
    steps = -(-len(found.train) // batch)
    sizes = BatchSizes(micro_batch=batch, global_batch=batch, steps_per_epoch=steps)
    feed = Feed(found.train, task, SerialComm(), sizes, seed=0, device=DEVICE)
    numbers = iter(range(10**9))

    def epoch() -> None:
        number = next(numbers)
        for _, parts in feed.inputs(feed.batches(Position(epoch=number)), number):
            for _ in parts:
                pass

    return epoch


def resident(rounds: int, batch: int, drawn: int) -> None:
    """CIFAR-10's shape on the device; the DataLoader has `drawn` images a round."""
    found = images.synthetic()
    assert isinstance(found.train, Resident)
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(found.mean, found.std),
        ]
    )
    pictures = Pictures(found.train, transform)
    loader = DataLoader(
        pictures,
        batch,
        sampler=RandomSampler(pictures, num_samples=drawn),
        num_workers=WORKERS,
        persistent_workers=True,
        pin_memory=DEVICE.type == "cuda",
    )
    meter, theirs = Meter(), f"DataLoader, torchvision, {WORKERS} workers"
    meter.measure(
        {"ours": (len(found.train), epochs_of(found, batch)), theirs: (drawn, lambda: through(loader))}, rounds
    )
    add(f"CIFAR-10's shape, batch {batch}, on {DEVICE.type}", meter.by_clock, "ours", theirs, ">= 10")


def photograph(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Large shapes, small ones and a little noise: 70 kB at 500 x 375."""
    parts = []
    for cell, strength in ((25, 1.0), (4, 0.25)):
        few = random.integers(0, 256, (height // cell, width // cell, 3), dtype=np.uint8)
        smooth: NDArray[Any] = np.asarray(Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC))
        parts.append(strength * (smooth.astype(np.float32) - 128))
    pixels = 128 + sum(parts) + random.normal(0, 6, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def make(folder: Path, count: int, width: int) -> list[Path]:
    """So many JPEGs of 4:3 to train on, in two classes, and one of each to test."""
    random, paths = np.random.default_rng(0), []
    for part, images_of_class in (("train", count // 2), ("val", 1)):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(images_of_class):
                path = folder / part / label / f"{number}.jpg"
                photograph(random, width, width * 3 // 4).save(path, quality=90)
                paths.append(path)
    return paths[: count // 2 * 2]


def folders(folder: Path, count: int, rounds: int, batch: int) -> None:
    """Readers of files: `count` images to train on."""
    preprocessing = models.preprocessing("efficientnet_b0")
    found = image_folder(list_images(folder), preprocessing, augment=True, seed=0, workers=WORKERS, prefetch=2)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(preprocessing.crop, interpolation=preprocessing.interpolation),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )
    loader = DataLoader(
        ImageFolder(folder / "train", transform),
        batch,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        pin_memory=DEVICE.type == "cuda",
    )
    meter, theirs = Meter(), f"DataLoader(ImageFolder), {WORKERS} workers"
    meter.measure({"ours": (count, epochs_of(found, batch)), theirs: (count, lambda: through(loader))}, rounds)
    add("JPEGs, by the clock", meter.by_clock, "ours", theirs, ">= 1.0")
    add("JPEGs, per second of a core", meter.by_core, "ours", theirs, ">= 1.0")


def by_pillow(path: str) -> Any:
    """As torchvision's ImageFolder decodes."""
    with Image.open(path) as file:
        return transforms.functional.pil_to_tensor(file.convert("RGB"))


def by_draft(path: str) -> Any:
    """Pillow, at the smallest of 1/1, 1/2, 1/4 and 1/8 that is not below 224 pixels: other pixels."""
    with Image.open(path) as file:
        file.draft("RGB", (224, 224))
        return transforms.functional.pil_to_tensor(file.convert("RGB"))


def by_torchvision(path: str) -> Any:
    """Without a look at the header by Pillow: what is no JPEG fails."""
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def turbojpeg() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """PyTurboJPEG, if it is here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from turbojpeg import TJPF_RGB, TurboJPEG  # type: ignore[import-not-found, unused-ignore]

            library = TurboJPEG()
        except (ImportError, RuntimeError, OSError):
            return
    yield "PyTurboJPEG", lambda path: library.decode(Path(path).read_bytes(), pixel_format=TJPF_RGB)


def decoders(paths: list[Path], rounds: int) -> None:
    """One after the other, against Pillow."""
    names = [str(path) for path in paths]
    known: dict[str, Callable[[str], Any]] = {
        "Pillow": by_pillow,
        "Pillow, draft": by_draft,
        "torchvision": by_torchvision,
        "ours": decode,
        **dict(turbojpeg()),
    }

    def every(decode: Callable[[str], Any]) -> None:
        for name in names:
            decode(name)

    meter = Meter()
    meter.measure({name: (len(names), partial(every, one)) for name, one in known.items()}, rounds)
    for name in list(known)[1:]:
        add(f"decoder: {name}", meter.by_clock, name, "Pillow")


def main() -> None:
    """All three questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, default=300, help="JPEGs")
    parser.add_argument("--width", type=int, default=500, help="of a JPEG, pixels; its height is 3/4 of that")
    parser.add_argument("--drawn", type=int, default=10_240, help="images of CIFAR-10's shape for a DataLoader")
    options = parser.parse_args()
    torch.set_num_threads(1)
    resident(options.rounds, 256, options.drawn)
    with tempfile.TemporaryDirectory() as name:
        paths = make(Path(name), options.images, options.width)
        size = sum(path.stat().st_size for path in paths) / len(paths)
        shape = f"{options.width} x {options.width * 3 // 4}, quality 90, {size / 1000:.0f} kB"
        TABLE.about |= {"JPEGs": f"{len(paths)} of {shape}", "threads per process": 1}
        decoders(paths[: min(100, len(paths))], options.rounds)
        folders(Path(name), len(paths), options.rounds, 32)
    TABLE.write()


if __name__ == "__main__":
    main()
