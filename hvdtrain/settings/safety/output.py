"""Printed lines, which never cost a run: a stream that is full, closed or without a reader loses them.

Once `guard_streams` was called, this holds for every print of the process, including those of the program itself. They
also erase a line that `draw` shows below them.
"""

import contextlib
import errno
import io
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

OUT, ERR = "standard output", "standard error"

_losses: Counter[str] = Counter()  # failed writes of each stream
_reasons: dict[str, str] = {}  # of the first one
_listeners: list[Callable[[str], object]] = []
_TO_LINE_END = "\x1b[K"  # erases from the cursor to the line end


class _Screen:
    """The state of the process's terminal."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.drawn = ""  # the line that is drawn at the moment
        self.is_begun = False  # the last print was an incomplete line
        self.printed_s = time.monotonic()  # when a stream was last written to


_screen = _Screen()
ended = threading.Event()  # the process prints its last lines, and draws no more


def _renew_screen() -> None:
    global _screen  # noqa: PLW0603 (a forked process may get a lock that is held)
    _screen = _Screen()


os.register_at_fork(after_in_child=_renew_screen)


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
        # Python with -u would write a line in parts, which a launcher mixes with those of other ranks.
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _Stream(io.FileIO):
    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, "w", closefd=False)
        self._what, self._is_terminal = what, os.isatty(number)

    def write(self, text: "ReadableBuffer") -> int:
        with _screen.lock, lossy(self._what):
            _screen.printed_s = time.monotonic()
            if self._is_terminal:
                draw("")
                _screen.is_begun = not bytes(text).endswith(b"\n")
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


def sees_prints() -> bool:
    """Return whether prints of this process pass through here: its standard error was not replaced, as by pytest."""
    return isinstance(getattr(getattr(sys.stderr, "buffer", None), "raw", None), _Stream)


def has_terminal() -> bool:
    """Return whether standard error is a terminal that can erase a line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return False


def draw(text: str) -> None:
    """Show a line at the end of standard error, a terminal, until something else is printed; empty to erase it."""
    with _screen.lock, contextlib.suppress(OSError, ValueError, AttributeError):
        if text == _screen.drawn or (text and (_screen.is_begun or ended.is_set())):
            return
        number = sys.stderr.fileno()
        if text and not _is_in_foreground(number):
            return
        text = text[: (os.get_terminal_size(number).columns or 80) - 1]
        os.write(number, f"\r{text}{_TO_LINE_END}".encode())
        _screen.drawn = text


def _is_in_foreground(terminal: int) -> bool:
    with contextlib.suppress(OSError):  # it is not the terminal that controls this process
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return True


def end_drawing() -> None:
    """Erase the line that is drawn; what is printed from now on is the end."""
    ended.set()
    draw("")


def silent_s() -> float:
    """Return the seconds since anything was printed."""
    return time.monotonic() - _screen.printed_s
