"""Finds images without a readable header, or with values without a range, before the training."""

import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image

from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput, print_message
from hvdtrain.tasks.vision.files import BROKEN, may_have_no_range, to_rgb
from hvdtrain.tasks.vision.listing import Listing

_MOST_READ = 20_000  # of a larger data set this number, at equal distances: a second or two
_THREADS = 16  # a network disk serves many requests at once


def require_readable(comm: Comm, listing: Listing, *, epochs: int, max_unreadable: int) -> None:
    """Raise BadInput on all ranks if the unreadable training images, times epochs, are more than `max_unreadable`.

    The ranks of a host share the work. An image whose header is not read is detected during decoding.
    """
    read = range(0, len(listing), -(-len(listing) // _MOST_READ))
    images = read[comm.local_rank :: comm.local_size]
    with ThreadPoolExecutor(_THREADS) as pool:
        reasons = pool.map(lambda image: _why_unreadable(listing.path(image)), images)
        unreadable = {image: reason for image, reason in zip(images, reasons, strict=True) if reason}
    training = int(torch.isin(torch.tensor([*unreadable], dtype=torch.int64), listing.splits[0]).sum())
    reports = comm.allgather([socket.gethostname(), len(unreadable), training, min(unreadable.items(), default=None)])
    counts, training_counts = Counter[str](), Counter[str]()
    for host, count, training_count, _ in reports:
        counts[host] += count
        training_counts[host] += training_count
    [(worst_host, count)] = counts.most_common(1)
    if not count:
        return
    first, reason = min(example for host, *_, example in reports if example and host == worst_host)
    path = " ".join(listing.path(first).split())  # one line
    problem = f"{count} of {len(read)} images cannot be read, such as {path} ({reason})"
    visits = max(training_counts.values()) * read.step * epochs  # images that are not read are like the others
    if visits > max_unreadable:
        raise BadInput(
            f"--data-dir {listing.folder}: {problem}; about {visits} in {epochs} epochs exceed the {max_unreadable} "
            "unreadable training images that a run may have. Repair or remove them."
        )
    if comm.rank == 0:
        print_message("warning", f"{problem}; training continues without them")


def _why_unreadable(path: str) -> str:
    """Return Pillow's reason in one line, or ours for values without a range; empty if the image seems readable."""
    try:
        with Image.open(path) as file:
            if may_have_no_range(file):
                to_rgb(file)
            return ""
    except BROKEN as error:
        return " ".join(str(error).replace(repr(path), "").split()) or type(error).__name__
