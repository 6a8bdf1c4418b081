import contextlib
import io
import os
import sys
import threading
import time

import pytest

from launch.run.supervise import screen
from launch.run.supervise.screen import Screen, can_draw, terminal_size
from tests.terminal import Pty


@pytest.fixture
def terminal(monkeypatch):
    """Standard error on a terminal of 20 columns, and lines that are drawn quickly; to be entered in the test."""

    @contextlib.contextmanager
    def shown():
        pty = Pty(columns=20)
        with monkeypatch.context() as patched, os.fdopen(pty.end, "w") as stream:
            patched.setattr(screen, "DRAW_S", 0.01)
            patched.setenv("TERM", "xterm")
            patched.setattr(sys, "stderr", stream)
            yield pty

    return shown


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_line_is_below_the_others_cut_to_the_width_and_gone_at_the_end(terminal):
    with terminal() as pty:
        shown, lines = Screen(), ["x" * 30]
        with shown.drawing(lambda: lines[-1]):
            until(lambda: pty.lines() == ["x" * 19])
            lines.append("short")
            until(lambda: pty.lines() == ["short"])  # with nothing left of the longer one
            shown.show(b"one\ntwo\n")
            until(lambda: pty.lines() == ["one", "two", "short"])
        until(lambda: pty.lines() == ["one", "two", ""])
        shown.show(b"three\n")
        until(lambda: pty.lines() == ["one", "two", "three", ""])


def test_nothing_is_drawn_over_a_line_that_has_begun(terminal):
    with terminal() as pty:
        shown = Screen()
        with shown.drawing(lambda: "status"):
            until(lambda: pty.lines() == ["status"])
            shown.show(b"\r 10%")
            assert pty.settled() == [" 10%"]
            shown.show(b"\r100%\n")
            until(lambda: pty.lines() == ["100%", "status"])


def test_a_line_that_is_waited_for_keeps_no_end_waiting_and_is_not_drawn_later(terminal):
    with terminal() as pty:
        waiting, answer = threading.Event(), threading.Event()

        def line():
            waiting.set()
            answer.wait()
            return "late"

        with Screen().drawing(line):
            waiting.wait()
        answer.set()
        assert pty.settled() == [""]


def test_in_the_background_of_a_shell_nothing_is_drawn(terminal, monkeypatch):
    monkeypatch.setattr(screen.os, "tcgetpgrp", lambda _: 1)
    drawn = []
    with terminal() as pty, Screen().drawing(lambda: drawn.append(1) or "status"):
        until(lambda: len(drawn) > 1)
        assert pty.text == ""


def test_a_terminal_that_erases_nothing_or_none_gets_no_line(terminal, monkeypatch):
    with terminal():
        assert can_draw()
        monkeypatch.setenv("TERM", "dumb")
        assert not can_draw()
        monkeypatch.delenv("TERM")
        assert not can_draw()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert not can_draw()


def test_ranks_get_a_terminal_of_the_size_of_ours_or_none(terminal, tmp_path):
    with terminal():
        assert terminal_size(sys.stderr)[1] == 20
    with (tmp_path / "file").open("w") as file:
        assert terminal_size(file) is None
    assert terminal_size(io.StringIO()) is None
