"""Files in folders where others may write, too: none is read without end, and none written through a planted link."""

import errno
import stat
from pathlib import Path
from typing import BinaryIO

MAX_MIB = 256  # 10 million steps of a run have less


def new_file(path: Path) -> BinaryIO:
    """Open a file that is made here, to be read and written; what stands there is removed, a planted link included."""
    path.unlink(missing_ok=True)
    return path.open("x+b")  # fails where a link is, in place of following it


def read_file(path: Path) -> bytes:
    """The content of a regular file; OSError for a device, or more than 256 MiB."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if facts.st_size > MAX_MIB << 20:
        raise OSError(errno.EFBIG, f"it has more than {MAX_MIB} MiB")
    return path.read_bytes()
