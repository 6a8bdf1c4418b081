"""Files in folders where others may write: reads are bounded and never wait; writes never follow a planted link."""

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_MIB = 256  # a run of 10 million steps has less


def new_file(path: Path) -> BinaryIO:
    """Create a file for reading and writing; an existing file or planted link is removed first."""
    path.unlink(missing_ok=True)
    return path.open("x+b")  # fails on a link instead of following it


def part_file(path: Path) -> Path:
    """Return the temporary name under which a file is written."""
    return path.with_name(f"{path.name}.part")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that a reader never sees an incomplete file."""
    file = new_file(part_file(path))
    try:
        with file:
            file.write(content)
        part_file(path).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part_file(path).unlink()
        raise


def shared_file(path: Path, content: bytes) -> mmap.mmap | None:
    """Return a mapping of a new, allocated file; None if the disk is full or mapping is impossible."""
    try:
        with new_file(part_file(path)) as file:
            file.write(content)
            file.flush()
            memory = mmap.mmap(file.fileno(), len(content))
        part_file(path).replace(path)  # the mapping of an earlier attempt keeps its own file
    except OSError:
        with contextlib.suppress(OSError):
            part_file(path).unlink(missing_ok=True)
        return None
    return memory


def read_file(path: Path, *, largest: int = MAX_MIB << 20) -> bytes:
    """Return the content of a regular file; OSError for a device, a pipe (at once), or more than `largest` bytes."""
    with open(path, "rb", opener=_open_at_once) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if facts.st_size > largest:
            raise OSError(errno.EFBIG, f"it has more than {largest >> 20} MiB")
        return file.read(facts.st_size)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe may have no writer
