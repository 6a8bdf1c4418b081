"""Small text files: reads are bounded, writes are atomic."""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_MIB = 16  # a topology or a host list is below 1 MiB


def read_text(file: Path) -> str:
    """Read a text file, line ends unchanged; OSError, or ValueError if it is a device, too long or not text."""
    with file.open("rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise ValueError("it is a device: pass a file")
        return text_of(stream)


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
    # It may have names of files, which need not be UTF-8. It fails on a planted link instead of following it.
    new = beside.open("x", encoding="utf-8", errors="surrogateescape")
    try:
        with new:
            new.write(text)
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
