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
