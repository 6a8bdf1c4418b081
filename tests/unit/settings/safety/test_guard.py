import errno
import os

import pytest
import torch

from hvdtrain.settings.safety import guard as guard_module
from hvdtrain.settings.safety.guard import QUIET_S, Guard, is_out_of_memory


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(guard_module.time, "monotonic", lambda: Clock.now)
    return Clock


def no_room(path="f"):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def fail(guard, error, action="log write", target="here"):
    with guard(action, target):
        raise error


def test_each_cause_is_counted_and_reported_once_a_minute(capsys, clock):
    guard = Guard()
    for error in (no_room(), OSError("in\n put"), no_room("other"), TimeoutError("a"), TimeoutError("b")):
        fail(guard, error)
    fail(guard, no_room(), action="checkpoint write")
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "hvdtrain: warning: log write failed: here: No space left on device; training continues"
    reported = ("OSError: in put", "TimeoutError: a", "checkpoint write failed: here: No space")
    assert all(message in line for message, line in zip(reported, lines, strict=True))
    clock.now += QUIET_S - 1
    fail(guard, no_room())
    assert capsys.readouterr().err == ""
    clock.now += 1
    fail(guard, no_room())
    fail(guard, no_room())
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert guard.counts == {"log write": 8, "checkpoint write": 1}


@pytest.mark.parametrize("error", [ValueError(), RuntimeError(), MemoryError(), KeyboardInterrupt()])
def test_only_an_os_error_is_caught(error):
    """The errors of Horovod, MPI and torch are RuntimeErrors."""
    guard = Guard()
    with pytest.raises(type(error)):
        fail(guard, error)
    assert guard.counts == {}


def test_memory_that_torch_cannot_get_is_known():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    found = [is_out_of_memory(one) for one in (error.value, MemoryError(), torch.OutOfMemoryError(), RuntimeError())]
    assert found == [True, True, True, False]
