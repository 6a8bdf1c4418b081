import socket

import pytest

from hvdtrain.vision.download import SILENCE_S, socket_timeout


@pytest.mark.parametrize("before", [None, 90.0])
def test_connections_time_out_inside_and_as_before_afterwards(before):
    socket.setdefaulttimeout(before)
    try:
        with socket_timeout():
            assert socket.getdefaulttimeout() == SILENCE_S
        assert socket.getdefaulttimeout() == before
        with pytest.raises(KeyError), socket_timeout():
            raise KeyError
        assert socket.getdefaulttimeout() == before
    finally:
        socket.setdefaulttimeout(None)


def test_a_silent_connection_is_an_os_error(monkeypatch):
    monkeypatch.setattr("hvdtrain.vision.download.SILENCE_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, socket_timeout():
        waiting = socket.socket(fileno=ours.detach())
        with waiting, pytest.raises(OSError, match="timed out"):
            waiting.recv(1)
