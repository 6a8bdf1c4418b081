"""Printed lines, which never cost a run: a stream that is full, closed or without a reader loses them.

Once `guard_streams` was called, this holds for every print of the process, including those of the program itself.
"""

import contextlib
import errno
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

OUT, ERR = "standard output", "standard error"

_losses: Counter[str] = Counter()  # failed writes of each stream
_reasons: dict[str, str] = {}  # of the first one
_listeners: list[Callable[[str], object]] = []


def guard_streams() -> None:
    """Let standard output and standard error drop what they cannot write, unless they were replaced."""
    for what, name in ((OUT, "stdout"), (ERR, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        number = os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()
        with lossy(what):
            setattr(sys, name, _guarded(_Stream(number, what), stream))


def _guarded(raw: "_Stream", stream: io.TextIOWrapper | None) -> io.TextIOWrapper:
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace")
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Stream(io.FileIO):
    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, "w", closefd=False)
        self._what = what

    def write(self, text: "ReadableBuffer") -> int:
        with lossy(self._what):
            if (written := super().write(text)) is not None:
                return written
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return memoryview(text).nbytes


@contextlib.contextmanager
def lossy(what: str) -> Iterator[None]:
    """Catch and note what a write to a stream raises, which the program may also have closed or replaced."""
    try:
        yield
    except (OSError, ValueError, AttributeError, RuntimeError) as error:  # RuntimeError: a write inside a write
        _losses[what] += 1
        if _losses[what] == 1:
            _reasons[what] = f"{what} cannot be written: {getattr(error, 'strerror', None) or error}"
            for note in _listeners:
                note("; ".join(_reasons.values()))


def on_loss(note: Callable[[str], object]) -> None:
    """Call `note` with one line of all streams that lose output when a stream begins to, or has done so already."""
    _listeners[:] = [note]
    if _reasons:
        note("; ".join(_reasons.values()))


def print_line(text: str, *, what: str = OUT) -> str | None:
    """Print a line; return why it is lost, None if it is not."""
    before = _losses[what]
    with lossy(what):
        print(text, file=sys.stderr if what == ERR else sys.stdout, flush=True)
    return None if _losses[what] == before else _reasons[what]


def flush() -> None:
    """Write what standard output and standard error still hold."""
    for what, stream in ((OUT, sys.stdout), (ERR, sys.stderr)):
        with lossy(what):
            stream.flush()


def has_terminal() -> bool:
    """Return whether standard error is a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return sys.stderr.isatty()
    return False
