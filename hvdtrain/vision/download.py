"""Downloads that give up without a network, instead of waiting for minutes."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

SILENCE_S = 15.0


@contextmanager
def socket_timeout() -> Iterator[None]:
    """Within this context, a connection that is silent for SILENCE_S seconds raises OSError."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout_s)
