"""Small text files: reads are bounded, writes are atomic."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_MIB = 16  # a topology or a host list is below 1 MiB


def read_text(file: Path) -> str:
    """Read a program's text file, line ends unchanged; OSError, or ValueError if it is too long or not text."""
    with open_regular(file) as stream:
        return text_of(stream)


def read_named(file: Path) -> str:
    """Read a file that the user names like `read_text`; it may also be a pipe, such as `<(command)`."""
    if file.is_char_device() or file.is_block_device():
        raise ValueError("it is a device: pass a file")
    if not file.is_fifo():
        return read_text(file)
    with file.open("rb") as stream:
        return text_of(stream)


def open_regular(file: Path, *, flags: int = 0) -> BinaryIO:
    """Open a file that another program writes, and may have replaced by a pipe without a writer; OSError for these."""
    at_once = os.O_NONBLOCK | os.O_NOCTTY | flags
    stream = open(file, "rb", opener=lambda path, mode: os.open(path, mode | at_once))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "it is not a regular file")


def text_of(stream: BinaryIO) -> str:
    """Read a stream to its end as text; ValueError if it is too long or not text."""
    content = stream.read((MAX_MIB << 20) + 1)
    if len(content) > MAX_MIB << 20:
        raise ValueError(f"it has more than {MAX_MIB} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None


def write_whole(file: Path, text: str) -> None:
    """Write a file under a temporary name and rename it; OSError if that fails."""
    beside = file.with_name(f"{file.name}.part")
    beside.unlink(missing_ok=True)
    new = beside.open("x", encoding="utf-8")  # fails on a planted link instead of following it
    try:
        with new:
            new.write(text)
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
