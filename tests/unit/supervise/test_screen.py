import contextlib
import io
import os
import sys
import time

from launch.supervise import screen
from launch.supervise.screen import Screen, can_draw
from tests.terminal import Pty


@contextlib.contextmanager
def terminal(monkeypatch):
    """Standard error on a terminal of 20 columns, and lines that are drawn quickly."""
    monkeypatch.setattr(screen, "DRAW_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    pty = Pty(columns=20)
    with monkeypatch.context() as patched, os.fdopen(pty.end, "w") as stream:
        patched.setattr(sys, "stderr", stream)
        yield pty


def until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_line_is_below_the_others_and_gone_at_the_end(monkeypatch):
    with terminal(monkeypatch) as pty:
        shown, drawn = Screen(), iter(f"step {n}" for n in range(10_000))
        with shown.drawing(lambda: next(drawn)):
            until(lambda: pty.lines()[-1].startswith("step"))
            shown.show(b"one\ntwo\n")
            until(lambda: len(pty.lines()) == 3 and pty.lines()[-1].startswith("step"))
            assert pty.lines()[:-1] == ["one", "two"]
        until(lambda: pty.lines() == ["one", "two", ""])
        shown.show(b"three\n")
        assert pty.settled() == ["one", "two", "three", ""]


def test_the_line_is_cut_to_the_width_and_a_shorter_one_leaves_nothing_of_it(monkeypatch):
    with terminal(monkeypatch) as pty:
        lines = ["x" * 30]
        with Screen().drawing(lambda: lines[-1]):
            until(lambda: pty.lines() == ["x" * 19])
            lines.append("short")
            until(lambda: pty.lines() == ["short"])


def test_nothing_is_drawn_over_a_line_that_has_begun(monkeypatch):
    with terminal(monkeypatch) as pty:
        shown = Screen()
        with shown.drawing(lambda: "status"):
            until(lambda: pty.lines() == ["status"])
            shown.show(b"\r 10%")
            assert pty.settled() == [" 10%"]
            shown.show(b"\r100%\n")
            until(lambda: pty.lines() == ["100%", "status"])


def test_a_line_that_is_waited_for_keeps_no_end_waiting_and_is_not_drawn_later(monkeypatch):
    with terminal(monkeypatch) as pty:
        waiting = []

        def line():
            waiting.append(True)
            time.sleep(0.2)
            return "late"

        began = time.monotonic()
        with Screen().drawing(line):
            until(lambda: waiting)
        assert time.monotonic() - began < 0.2
        time.sleep(0.3)
        assert pty.text == ""


def test_in_the_background_of_a_shell_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(screen.os, "tcgetpgrp", lambda _: 1)
    with terminal(monkeypatch) as pty, Screen().drawing(lambda: "status"):
        time.sleep(0.05)
        assert pty.text == ""


def test_a_terminal_that_erases_nothing_or_none_gets_no_line(monkeypatch):
    with terminal(monkeypatch):
        assert can_draw()
        for term in ("dumb", None):
            monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM")
            assert not can_draw()
        monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not can_draw()
