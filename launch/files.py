"""Small text files: reads are bounded, writes are atomic, and a folder belongs to one process at a time."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from launch.errors import CommandError, LaunchError

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


@contextlib.contextmanager
def held(folder: Path, named: str = "--name ") -> Iterator[None]:
    """Hold a folder for this process, before anything in it is read; CommandError names the process that has it.

    `named` precedes the folder's name in what the user has given. A folder in which nothing was written is removed.
    """
    try:
        lock = _lock(folder, named)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if [path.name for path in folder.iterdir()] == ["lock"]:
                (folder / "lock").unlink()
                folder.rmdir()
                folder.parent.rmdir()
        os.close(lock)


def _lock(folder: Path, named: str) -> int:
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 200, 0).decode(errors="replace") or "that has just begun"
            os.close(lock)
            raise CommandError(
                f"{named}{folder.name}: in use by process {owner}: wait for its end, or choose another name"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # its last holder has removed it meanwhile
            if os.path.samestat(os.fstat(lock), (folder / "lock").stat()):
                os.ftruncate(lock, 0)
                os.write(lock, f"{os.getpid()} on {socket.gethostname()}".encode())
                return lock
        os.close(lock)
