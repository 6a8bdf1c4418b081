"""Which images of a folder have no readable header: looked at once per data set and host."""

import json
import os
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from PIL import Image

from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput, launched_rank
from hvdtrain.tracking.console import progress
from hvdtrain.tracking.files import write_json
from hvdtrain.vision.listing import Listing

# What Pillow raises for files that it cannot read, by format: RuntimeError for AVIF and DDS.
BROKEN = (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError)
_MOST_TOLD = 10_000  # images that a rank names; with more of them nothing is kept
_THREADS = 16  # a network disk answers many at once
_AT_A_TIME = 500  # images for a thread


def require_readable(comm: Comm, listing: Listing, *, epochs: int, most: int) -> None:
    """Raise BadInput on all ranks where training images without a header, once per epoch, are more than `most`.

    The ranks of a host share the work. It is kept in a file: at the next start only the unreadable ones are looked at
    again. One that breaks later shows when it is decoded.
    """
    known = _kept(listing)
    images = range(len(listing)) if known is None else known
    bad = _without_header(listing, images[comm.local_rank :: comm.local_size])
    training = int(torch.isin(torch.tensor(bad, dtype=torch.int64), listing.splits[0]).sum())
    host = socket.gethostname()
    told = comm.allgather([host, len(bad), training, bad[:_MOST_TOLD], known is None])
    counts, counts_of_training, bad_of = Counter[str](), Counter[str](), defaultdict[str, set[int]](set)
    for name, count, of_training, some, _ in told:
        counts[name] += count
        counts_of_training[name] += of_training
        bad_of[name] |= set(some)
    [(worst, count)] = counts.most_common(1)
    if count:
        first = " ".join(listing.path(min(bad_of[worst])).split())  # one line
        found = f"{count} of {len(listing)} images cannot be read, as {first}"
        visits = max(counts_of_training.values()) * epochs
        if visits > most:
            raise BadInput(
                f"--data-dir {listing.folder}: {found}; those for training, {visits} in {epochs} epochs, are more than "
                f"--max-unreadable-images {most}: repair or remove them, or allow more"
            )
        if comm.rank == 0:
            print(f"hvdtrain: warning: {found}; they are left out", file=sys.stderr, flush=True)
    is_whole = len(bad_of[host]) == counts[host]
    if comm.local_rank == 0 and is_whole and all(looked for name, *_, looked in told if name == host):
        _keep(listing, sorted(bad_of[host]))


def _without_header(listing: Listing, images: Sequence[int]) -> list[int]:
    def among(some: Sequence[int]) -> list[int]:
        return [image for image in some if not _has_header(listing.path(image))]

    with ThreadPoolExecutor(_THREADS) as pool:
        # In small parts: who presses Ctrl-C waits for those that have begun.
        asked = [images[first : first + _AT_A_TIME] for first in range(0, len(images), _AT_A_TIME)]
        parts = progress(
            pool.map(among, asked),
            shown=launched_rank() == 0,
            what=f"reading headers, {_AT_A_TIME} at a time",
            unit="part",
            total=len(asked),
        )
        return sorted(image for part in parts for image in part)


def _has_header(path: str) -> bool:
    try:
        with Image.open(path):
            return True
    except BROKEN:
        return False


def _places(listing: Listing) -> list[Path]:
    """The files that may keep the answer: beside the data, where other hosts and users find it, or the user's own."""
    beside = listing.folder / ".hvdtrain-headers.json"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # there is no home
        own = Path(cache if cache.startswith("/") else "~/.cache").expanduser() / "hvdtrain"
        return [beside, own / f"headers-{sha256(bytes(listing.folder.absolute())).hexdigest()[:16]}.json"]
    return [beside]


def _kept(listing: Listing) -> list[int] | None:
    """The unreadable images of just this listing, if somebody has looked."""
    for place in _places(listing):
        with suppress(OSError, ValueError, RecursionError):
            match json.loads(place.read_bytes()):
                case {"key": listing.key, "unreadable": list(images)}:
                    if all(type(image) is int and 0 <= image < len(listing) for image in images):
                        return images
    return None


def _keep(listing: Listing, images: list[int]) -> None:
    """Write it down where that is possible."""
    for place in _places(listing):
        with suppress(OSError):
            if place.parent != listing.folder:
                place.parent.mkdir(parents=True, exist_ok=True)
            write_json(place, {"key": listing.key, "unreadable": images})
            return
