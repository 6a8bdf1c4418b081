"""Finds images without a readable header, or with values without a range, once per data set and host."""

import json
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from PIL import Image

from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput, launched_rank, print_message
from hvdtrain.tracking.console import progress_bar
from hvdtrain.tracking.files import write_json
from hvdtrain.vision.files import BROKEN, may_have_no_range, to_rgb
from hvdtrain.vision.listing import Listing

_MAX_NAMED = 10_000  # images listed by a rank; with more of them nothing is cached
_THREADS = 16  # a network disk serves many requests at once
_IMAGES_AT_A_TIME = 500  # images per thread


def require_readable(comm: Comm, listing: Listing, *, epochs: int, max_unreadable: int) -> None:
    """Raise BadInput on all ranks if the unreadable training images, times epochs, are more than `max_unreadable`.

    The ranks of a host share the work. A file caches the result: the next start reads only the unreadable images again.
    An image that is damaged later is detected during decoding.
    """
    cached = _read_cache(listing)
    images = range(len(listing)) if cached is None else cached
    reasons = _find_unreadable(listing, images[comm.local_rank :: comm.local_size])
    unreadable = sorted(reasons)
    training = int(torch.isin(torch.tensor(unreadable, dtype=torch.int64), listing.splits[0]).sum())
    host = socket.gethostname()
    reports = comm.allgather([host, len(unreadable), training, unreadable[:_MAX_NAMED], cached is None])
    counts, training_counts, unreadable_by_host = Counter[str](), Counter[str](), defaultdict[str, set[int]](set)
    for name, count, training_count, named_images, _ in reports:
        counts[name] += count
        training_counts[name] += training_count
        unreadable_by_host[name] |= set(named_images)
    [(worst_host, count)] = counts.most_common(1)
    if count:
        first = min(unreadable_by_host[worst_host])
        reason = reasons.get(first) or _why_unreadable(listing.path(first))
        shown = f"{' '.join(listing.path(first).split())}{reason and f' ({reason})'}"  # one line
        problem = f"{count} of {len(listing)} images cannot be read, such as {shown}"
        visits = max(training_counts.values()) * epochs
        if visits > max_unreadable:
            raise BadInput(
                f"--data-dir {listing.folder}: {problem}; {visits} in {epochs} epochs exceed the {max_unreadable} "
                "unreadable training images that a run may have. Repair or remove them."
            )
        if comm.rank == 0:
            print_message("warning", f"{problem}; training continues without them")
    is_complete = len(unreadable_by_host[host]) == counts[host]
    if comm.local_rank == 0 and is_complete and all(has_read for name, *_, has_read in reports if name == host):
        _write_cache(listing, sorted(unreadable_by_host[host]))


def _find_unreadable(listing: Listing, images: Sequence[int]) -> dict[int, str]:
    """Return the reason for each image that cannot be read."""

    def find_in(images: Sequence[int]) -> dict[int, str]:
        return {image: reason for image in images if (reason := _why_unreadable(listing.path(image)))}

    with ThreadPoolExecutor(_THREADS) as pool:
        # In small ranges: after Ctrl-C the running ones are completed.
        ranges = [images[first : first + _IMAGES_AT_A_TIME] for first in range(0, len(images), _IMAGES_AT_A_TIME)]
        parts = progress_bar(
            pool.map(find_in, ranges),
            is_shown=launched_rank() == 0,
            title=f"reading headers, {_IMAGES_AT_A_TIME} at a time",
            unit="part",
            total=len(ranges),
        )
        return {image: reason for part in parts for image, reason in part.items()}


def _why_unreadable(path: str) -> str:
    """Return Pillow's reason in one line, or ours for values without a range; empty if the image seems readable."""
    try:
        with Image.open(path) as file:
            if may_have_no_range(file):
                to_rgb(file)
            return ""
    except BROKEN as error:
        return " ".join(str(error).replace(repr(path), "").split()) or type(error).__name__


def _cache_files(listing: Listing) -> list[Path]:
    """Return the possible cache files: next to the data, for other hosts and users, or in the user's cache."""
    data_file = listing.folder / ".hvdtrain-headers.json"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # no home directory
        cache_folder = Path(cache if cache.startswith("/") else "~/.cache").expanduser() / "hvdtrain"
        return [data_file, cache_folder / f"headers-{sha256(bytes(listing.folder.absolute())).hexdigest()[:16]}.json"]
    return [data_file]


def _read_cache(listing: Listing) -> list[int] | None:
    """Return the unreadable images of exactly this listing; None if no file has them."""
    for file in _cache_files(listing):
        with suppress(OSError, ValueError, RecursionError):
            match json.loads(file.read_bytes()):
                case {"key": listing.key, "unreadable": list(images)}:
                    if all(type(image) is int and 0 <= image < len(listing) for image in images):
                        return images
    return None


def _write_cache(listing: Listing, images: list[int]) -> None:
    """Write the result into the first file that can be written."""
    for file in _cache_files(listing):
        with suppress(OSError):
            if file.parent != listing.folder:
                file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"key": listing.key, "unreadable": images})
            return
