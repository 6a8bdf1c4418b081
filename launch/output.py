"""Printed lines, which never cost a run: what a full, closed or broken standard error does not take is dropped."""

import contextlib
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_reasons: list[str] = []  # of the first loss


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
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError) as error:
        note_loss(error)


def say(line: str) -> None:
    """Print a line of hvdlaunch itself."""
    print_line(f"hvdlaunch: {line}")


def note_loss(error: OSError | ValueError) -> None:
    """Remember why output was lost."""
    _reasons[:] = _reasons or [f"standard error cannot be written: {getattr(error, 'strerror', None) or error}"]


def lost() -> str | None:
    """Return why some output was lost; None if none was."""
    return _reasons[0] if _reasons else None
