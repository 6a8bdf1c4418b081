"""Files in folders where other users may write: reads are bounded, and writes never follow a planted link."""

import errno
import stat
from pathlib import Path
from typing import BinaryIO

MAX_MIB = 256  # a run of 10 million steps has less


def new_file(path: Path) -> BinaryIO:
    """Create a file for reading and writing; an existing file or planted link is removed first."""
    path.unlink(missing_ok=True)
    return path.open("x+b")  # fails on a link instead of following it


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; OSError for a device, or for more than 256 MiB."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if facts.st_size > MAX_MIB << 20:
        raise OSError(errno.EFBIG, f"it has more than {MAX_MIB} MiB")
    return path.read_bytes()
