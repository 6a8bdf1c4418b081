"""Downloads that give up without a network, instead of waiting for minutes."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

SILENCE_S = 15.0


@contextmanager
def giving_up() -> Iterator[None]:
    """Inside, a connection that is silent for SILENCE_S seconds raises OSError."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
