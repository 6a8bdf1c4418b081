"""Data sets for tests: a small CIFAR-10, and files of images."""

import hashlib
import pickle

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import pil_to_tensor

from hvdtrain.tasks.vision import data
from hvdtrain.tasks.vision.files import image_folder
from hvdtrain.tasks.vision.listing import list_images
from hvdtrain.tasks.vision.preprocessing import Preprocessing

EIGHT = Preprocessing(
    resize=8, crop=8, interpolation=InterpolationMode.BICUBIC, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1)
)


def load(name, folder=None):
    return data.load(name, folder)


def folder_of(folder, preprocessing=EIGHT, *, augment=False, seed=0, workers=1, prefetch=2):
    return image_folder(
        list_images(folder), preprocessing, augment=augment, seed=seed, workers=workers, prefetch=prefetch
    )


class Cifar:
    """A small CIFAR-10: five batches that share the training images, and a test batch."""

    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(self, *, train=15, test=10):
        random = np.random.default_rng(0)
        sizes = {f"data_batch_{number}": (train + number - 1) // 5 for number in range(1, 6)} | {"test_batch": test}
        self.rows = {name: random.integers(0, 256, (size, 3072), dtype=np.uint8) for name, size in sizes.items()}
        self.labels = {name: random.integers(0, 10, len(rows)).tolist() for name, rows in self.rows.items()}
        self.files = {
            name: pickle.dumps({"data": rows, "labels": self.labels[name]}) for name, rows in self.rows.items()
        }
        self.files["batches.meta"] = pickle.dumps({"label_names": self.names})
        md5 = {name: hashlib.md5(content).hexdigest() for name, content in self.files.items()}  # noqa: S324
        self.sums = {
            "train_list": [[name, md5[name]] for name in sizes if name != "test_batch"],
            "test_list": [["test_batch", md5["test_batch"]]],
            "meta": {**CIFAR10.meta, "md5": md5["batches.meta"]},
        }

    def write(self, root):
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


def put_in_place(monkeypatch):
    """A small CIFAR-10 whose checksums torchvision takes for the real ones."""
    written = Cifar()
    for name, sums in written.sums.items():
        monkeypatch.setattr(CIFAR10, name, sums)
    return written


def write_image(path, *, height=8, width=8, seed=0, mode="RGB"):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels, mode).save(path)
    return pixels


def by_pillow(path):
    """An image file's pixels, uint8 (3, H, W)."""
    with Image.open(path) as file:
        return pil_to_tensor(file.convert("RGB"))
