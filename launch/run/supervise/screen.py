"""The output of a run, with a status line below it that is redrawn in place and erased before any other output."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from launch import output
from launch.errors import harmless

DRAW_S = 0.5  # between redraws
USUAL_COLUMNS = 80  # for a terminal of unknown width
TO_LINE_END = "\x1b[K"  # erases from the cursor to the line end


class Screen:
    """Standard output and standard error, shared by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn = ""  # the line that is currently drawn
        self._is_begun = False  # the last output was an incomplete line, which must not be overwritten

    def show(self, text: bytes, stream: TextIO | None = None) -> None:
        """Write a part of the output to standard error, or to another stream."""
        if not text:
            return
        with self._lock:
            self._erase()
            self._is_begun = not text.endswith(b"\n")
            if stream is None:
                output.log.add(text)
            _write(stream or sys.stderr, text)

    def say(self, line: str) -> None:
        """Print a line of hvdlaunch itself."""
        output.say(harmless(line), lambda text: self.show(f"{text}\n".encode()))

    @contextlib.contextmanager
    def drawing(self, line: Callable[[], str]) -> Iterator[None]:
        """Draw the line that `line` returns at the end of standard error, twice a second; erase it at the end.

        `line` is called on a separate thread: it may read from a network file system that hangs.
        """
        ended = threading.Event()

        def draw() -> None:
            while not ended.wait(DRAW_S):
                text = line()
                with self._lock:
                    if not ended.is_set() and not self._is_begun and _is_in_foreground():
                        _, columns = terminal_size(sys.stderr) or (0, 0)
                        self._draw(text[: (columns or USUAL_COLUMNS) - 1])

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


def terminal_size(stream: TextIO) -> tuple[int, int] | None:
    """Return lines and columns of a terminal; None if the stream is not one."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return None
    return size.lines, size.columns


def can_draw() -> bool:
    """Return whether standard error is a terminal that can erase a line."""
    return not sys.stderr.closed and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _is_in_foreground() -> bool:
    """Return whether this process is in the foreground; False without a controlling terminal."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return True


def _write(stream: TextIO, text: bytes) -> None:
    try:
        stream.buffer.write(text)
        stream.buffer.flush()
    except (OSError, ValueError) as error:  # no reader is left; the ranks continue
        output.note_loss(error)
