"""Where a run's output goes, and one more line below it, which is drawn anew in its place and gone before any other."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

DRAW_S = 0.5  # from one drawing to the next
USUAL_COLUMNS = 80  # of a terminal that does not tell
TO_LINE_END = "\x1b[K"  # erases from the cursor on


class Screen:
    """Standard output and standard error, as several threads write to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn = ""  # the line that is there now
        self._is_begun = False  # what was shown last is no whole line yet: nothing is drawn over it

    def show(self, text: bytes, stream: TextIO | None = None) -> None:
        """Write a part of the output to standard error, or to another stream."""
        if not text:
            return
        with self._lock:
            self._erase()
            self._is_begun = not text.endswith(b"\n")
            _write(stream or sys.stderr, text)

    @contextlib.contextmanager
    def drawing(self, line: Callable[[], str]) -> Iterator[None]:
        """Draw the line that `line` returns at the end of standard error, twice a second; at the end it is gone.

        `line` is called on a thread of its own: it may read from a network file system that hangs.
        """
        ended = threading.Event()

        def draw() -> None:
            while not ended.wait(DRAW_S):
                text = line()
                with self._lock:
                    if not ended.is_set() and not self._is_begun and _is_in_foreground():
                        self._draw(text[: _columns() - 1])

        threading.Thread(target=draw, daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                ended.set()
                self._erase()

    def _draw(self, text: str) -> None:
        if text != self._drawn:
            _write(sys.stderr, f"\r{text}{TO_LINE_END}".encode())
        self._drawn = text

    def _erase(self) -> None:
        if self._drawn:
            _write(sys.stderr, f"\r{TO_LINE_END}".encode())
        self._drawn = ""


def can_draw() -> bool:
    """Whether standard error is a terminal that can erase a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _is_in_foreground() -> bool:
    """Whether this process is not in the background of a shell; it is not if it has no such terminal."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return True


def _columns() -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    return USUAL_COLUMNS


def _write(stream: TextIO, text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads us any more; the ranks go on
        stream.buffer.write(text)
        stream.buffer.flush()
