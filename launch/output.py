"""Printed lines, which never cost a run: what a full, closed or broken standard error does not take is dropped.

A command that starts a job also keeps them in the log of the job.
"""

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_reasons: list[str] = []  # of the first loss
MOST_KEPT = 64 << 20  # bytes; rank 0 may write without end, and has a log of its own


class Log:
    """The lines of this process, with their times, in memory until there is a file."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._waiting, self._begun, self._room = b"", b"", MOST_KEPT

    def keep_in(self, file: Path) -> None:
        """Append all lines so far and from now on to a file; without one, for example on a full disk, none is kept."""
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            before, self._file = self._file, os.open(file, flags, 0o600)
            self._write(b"")
            if before is not None:
                os.close(before)

    def add(self, text: bytes) -> None:
        """Keep a part of the output; its last line may be incomplete."""
        *lines, self._begun = (self._begun + text).split(b"\n")
        self._begun = self._begun[-4096:]
        now = time.strftime("%Y-%m-%d %H:%M:%S ").encode()
        self._write(b"".join(now + line.rpartition(b"\r")[2] + b"\n" for line in lines))

    def _write(self, lines: bytes) -> None:
        lines, self._waiting = (self._waiting + lines)[: self._room], b""
        if self._file is None:
            self._waiting = lines
            return
        self._room -= len(lines)
        with contextlib.suppress(OSError):
            os.write(self._file, lines)


log = Log()


class _Errors(io.FileIO):
    def write(self, text: "ReadableBuffer") -> int:
        try:
            if (written := super().write(text)) is not None:
                return written
        except OSError as error:
            note_loss(error)
        return memoryview(text).nbytes


def guard_errors() -> None:
    """Let standard error drop what it cannot write, unless it was replaced."""
    stream = sys.stderr
    if isinstance(stream, io.TextIOWrapper) and stream is sys.__stderr__:
        with contextlib.suppress(OSError, ValueError):
            raw = io.BufferedWriter(_Errors(stream.fileno(), "w", closefd=False))
            sys.stderr = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)


def print_line(line: str) -> None:
    """Print a line for the user on standard error."""
    log.add(f"{line}\n".encode(errors="backslashreplace"))
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError) as error:
        note_loss(error)


def say(line: str, show: Callable[[str], object] = print_line) -> None:
    """Print a line of hvdlaunch itself; a note or a warning by the logger `hvdlaunch`."""
    severity, _, text = line.partition(": ")
    if severity in _LEVELS:
        LOGGER.log(_LEVELS[severity], text, stacklevel=2, extra={"show": show})
    else:
        show(f"hvdlaunch: {line}")


_LEVELS = {"note": logging.INFO, "warning": logging.WARNING}


class _Printer(logging.Handler):
    """Prints a note or a warning as a line, unless the program has a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if LOGGER.handlers == [self] and not logging.root.handlers:
            severity = "warning" if record.levelno >= logging.WARNING else "note"
            getattr(record, "show", print_line)(f"hvdlaunch: {severity}: {record.getMessage()}")


LOGGER = logging.getLogger("hvdlaunch")
LOGGER.setLevel(logging.INFO)
LOGGER.addHandler(_Printer())


def note_loss(error: OSError | ValueError) -> None:
    """Note once why output was lost."""
    if not _reasons:
        _reasons.append(f"standard error cannot be written: {getattr(error, 'strerror', None) or error}")
        log.add(f"{_reasons[0]}\n".encode(errors="backslashreplace"))
