"""How a run starts on an image folder of ImageNet's size, and the memory that its processes take.

    python bench/image_folders.py --on /dev/shm --starts 3

1,281,167 + 50,000 hard links to four small JPEGs, in 1,000 classes, are made on that disk and removed at the end. Each
start is a rank of its own with two loader workers; the first one looks at all headers, the others find that kept.
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import torch
from PIL import Image

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.vision import headers, listing, models
from hvdtrain.vision.files import image_folder
from hvdtrain.vision.settings import TINY, EffnetSettings, scaled

CLASSES, TRAIN, VAL = 1000, 1_281_167, 50_000
BATCH, WORKERS = 256, 2


def make(folder: Path) -> None:
    """Links named as ImageNet's files are."""
    random = np.random.default_rng(0)
    originals = [folder / f"{number}.jpg" for number in range(4)]
    for original, (height, width) in zip(originals, [(36, 48), (48, 36), (40, 40), (48, 64)], strict=True):
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(original)
    for part, images in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            class_folder = folder / part / f"n{label:08}"
            class_folder.mkdir(parents=True)
            for number in range(images * label // CLASSES, images * (label + 1) // CLASSES):
                os.link(originals[number % 4], class_folder / f"n{label:08}_{number}.JPEG")


def memory(process: psutil.Process) -> str:
    """Resident memory, and what of it no other process has."""
    found = process.memory_full_info()
    return f"{found.rss / 2**20:.0f} MiB ({found.uss / 2**20:.0f} its own)"


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long it takes, and how much of that the rank computes."""
    started, computed = time.perf_counter(), time.process_time()
    yield
    took, computed = time.perf_counter() - started, time.process_time() - computed
    print(f"  {what}: {took:.1f} s, {computed:.1f} s of them on a core", flush=True)


def start(folder: Path) -> None:
    """One rank, up to its first batch of an epoch and of an evaluation."""
    config: EffnetSettings = replace(scaled(), data="imagefolder", data_dir=folder, model=TINY)
    rank = psutil.Process()
    print(f"rank before: {memory(rank)}")
    with timed("listing"):
        found = listing.list_images(folder)
    with timed("headers"):
        headers.require_readable(SerialComm(), found, epochs=config.epochs, max_unreadable=100)
    preprocessing = models.preprocessing(config.model)
    images = image_folder(found, preprocessing, augment=True, seed=0, workers=WORKERS, prefetch=2)
    sent: list[int] = []

    def dump(value: object, file: io.BufferedIOBase, protocol: int | None = None) -> None:
        begin = file.tell()
        ForkingPickler(file, protocol).dump(value)
        sent.append(file.tell() - begin)

    cpu = torch.device("cpu")
    with mock.patch("multiprocessing.popen_spawn_posix.reduction.dump", dump):
        epoch = images.train.batches(torch.randperm(len(images.train)).split(BATCH), cpu, 0)
        with timed("workers and the first batch of an epoch"):
            next(epoch)
    for _ in range(20):
        next(epoch)
    test = images.test.batches(torch.arange(len(images.test)).split(BATCH), cpu, None)
    with timed("the first batch of an evaluation"):
        next(test)
    workers = [one for one in rank.children() if "spawn_main" in " ".join(one.cmdline())]
    print(f"rank: {memory(rank)}; its {len(workers)} workers: {', '.join(memory(one) for one in workers)}")
    print(f"sent to a worker: {sum(sent) // len(workers)} bytes", flush=True)


def main() -> None:
    """Make the folder, start some times, remove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)  # one start
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.of is not None:
        start(options.of)
        return
    with tempfile.TemporaryDirectory(prefix="images-", dir=options.on) as folder:
        make(Path(folder))
        for number in range(options.starts):
            print(f"start {number + 1}", flush=True)
            subprocess.run([sys.executable, __file__, "--of", folder], check=True)


if __name__ == "__main__":
    main()
