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

from PIL import Image

from hvdtrain.ranks.comm import Comm
from hvdtrain.record.files import write_json
from hvdtrain.safety.exits import BadInput
from hvdtrain.vision.listing import Listing

# What Pillow raises for files that it cannot read, by format.
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_THREADS = 16  # a network disk answers many at once


def require_readable(comm: Comm, listing: Listing, *, epochs: int, most: int) -> None:
    """Raise BadInput on all ranks where images without a header, counted once per epoch, are more than `most`.

    The ranks of a host share the work. It is kept in a file: at the next start only the unreadable ones are looked at
    again. One that breaks later shows when it is decoded.
    """
    known = _kept(listing)
    images = range(len(listing)) if known is None else known
    bad, at_most = _without_header(listing, images[comm.local_rank :: comm.local_size]), most // epochs
    host = socket.gethostname()
    told = comm.allgather([host, len(bad), bad[: at_most + 1], known is None])
    counts, bad_of = Counter[str](), defaultdict[str, list[int]](list)
    for name, count, some, _ in told:
        counts[name] += count
        bad_of[name] += some
    [(worst, count)] = counts.most_common(1)
    if count:
        first = " ".join(listing.path(min(bad_of[worst])).split())  # one line
        found = f"{count} of {len(listing)} images cannot be read, as {first}"
        if count > at_most:
            raise BadInput(
                f"--data-dir {listing.folder}: {found}; {count * epochs} in {epochs} epochs are more than "
                f"--max-unreadable-images {most}: repair or remove them, or allow more"
            )
        if comm.rank == 0:
            print(f"hvdtrain: warning: {found}; they count as images without a gradient", file=sys.stderr, flush=True)
    if comm.local_rank == 0 and all(looked for name, *_, looked in told if name == host):
        _keep(listing, sorted(bad_of[host]))


def _without_header(listing: Listing, images: Sequence[int]) -> list[int]:
    def among(some: Sequence[int]) -> list[int]:
        return [image for image in some if not _has_header(listing.path(image))]

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = pool.map(among, [images[thread::_THREADS] for thread in range(_THREADS)])
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
