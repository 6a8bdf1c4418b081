"""Data sets for tests: a small CIFAR-10 in the real one's format, and files of images."""

import hashlib
import struct

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import pil_to_tensor

from hvdtrain.vision import data
from hvdtrain.vision.files import image_folder
from hvdtrain.vision.listing import list_images
from hvdtrain.vision.preprocessing import Preprocessing

EIGHT = Preprocessing(
    resize=8, crop=8, interpolation=InterpolationMode.BICUBIC, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1)
)


def load(name, folder=None):
    return data.load(name, folder)


def folder_of(folder, preprocessing=EIGHT, *, augment=False, seed=0, workers=1, prefetch=2):
    return image_folder(
        list_images(folder), preprocessing, augment=augment, seed=seed, workers=workers, prefetch=prefetch
    )


def python_2_pickle(value):
    """What Python 2 with NumPy 1 wrote CIFAR-10 with: byte strings and a module name that are gone since."""

    def packed(one):
        if isinstance(one, bytes):
            return b"T" + struct.pack("<i", len(one)) + one
        if isinstance(one, int):
            return b"J" + struct.pack("<i", one)
        if isinstance(one, list):
            return b"](" + b"".join(map(packed, one)) + b"e"
        if isinstance(one, dict):
            return b"}(" + b"".join(packed(key) + packed(item) for key, item in one.items()) + b"u"
        rows, columns = one.shape
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\1btR"
        kind = b"cnumpy\ndtype\n(U\2u1K\0K\1tR(K\3U\1|NNN" + packed(-1) + packed(-1) + b"K\0tb"
        return empty + b"(K\1(" + packed(rows) + packed(columns) + b"t" + kind + b"\x89" + packed(one.tobytes()) + b"tb"

    return b"\x80\2" + packed(value) + b"."


class Cifar:
    """A small CIFAR-10 in the real one's format: five batches that share the training images, and a test batch."""

    names = (b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck")

    def __init__(self, *, train=15, test=10):
        random = np.random.default_rng(0)
        sizes = {f"data_batch_{number}": (train + number - 1) // 5 for number in range(1, 6)} | {"test_batch": test}
        self.rows = {name: random.integers(0, 256, (size, 3072), dtype=np.uint8) for name, size in sizes.items()}
        self.labels = {name: random.integers(0, 10, len(rows)).tolist() for name, rows in self.rows.items()}
        self.files = {
            name: python_2_pickle(
                {
                    b"data": self.rows[name],
                    b"labels": self.labels[name],
                    b"batch_label": name.encode(),
                    b"filenames": [b"%d.png" % number for number in range(len(self.rows[name]))],
                }
            )
            for name in self.rows
        }
        meta = {b"num_cases_per_batch": train // 5, b"label_names": list(self.names), b"num_vis": 3072}
        self.files["batches.meta"] = python_2_pickle(meta)
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
