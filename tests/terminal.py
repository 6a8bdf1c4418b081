"""Standard error as a terminal."""

import io
import sys


class Terminal(io.StringIO):
    """Keeps what it shows."""

    def isatty(self):
        return True


def terminal_of(monkeypatch):
    """Standard error from now on; call it in the test itself, since pytest replaces that of a fixture."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown
