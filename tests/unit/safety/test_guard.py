import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdtrain.safety import guard as guard_module
from hvdtrain.safety.guard import QUIET_S, Guard


class MpiError(RuntimeError):
    """Stands in for mpi4py.MPI.Exception, since its import would start MPI."""


MpiError.__module__, MpiError.__qualname__ = "mpi4py.MPI", "Exception"


class UnluckyError(ValueError):
    pass


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(guard_module.time, "monotonic", lambda: Clock.now)
    return Clock


def no_room(path="f"):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def fail(guard, error, action="log write", target="here", **options):
    with guard(action, target, **options):
        raise error


def test_an_os_error_is_counted_reported_and_passed_to_the_callback(capsys, tmp_path):
    guard, seen = Guard(), []
    error = no_room()
    fail(guard, error, target=tmp_path, on_failure=seen.append)
    assert guard.counts == {"log write": 1}
    assert seen == [error]
    assert capsys.readouterr() == (
        "",
        f"hvdtrain: warning: log write failed: {tmp_path}: No space left on device; training continues\n",
    )


def test_a_guarded_function_returns_none_where_it_failed():
    guard = Guard()

    @guard("remote read")
    def read(number):
        if number == 2:
            raise TimeoutError("late")
        return number

    assert [read(number) for number in (1, 2, 3)] == [1, None, 3]
    assert guard.counts == {"remote read": 1}


def test_each_cause_is_reported_once_a_minute(capsys, clock):
    guard = Guard()
    for error in (no_room(), OSError("in\n put"), no_room("other"), TimeoutError("a"), TimeoutError("b")):
        fail(guard, error)
    fail(guard, no_room(), action="checkpoint write")
    lines = capsys.readouterr().err.splitlines()
    reported = (
        "log write failed: here: No space",
        "OSError: in put",
        "TimeoutError: a",
        "checkpoint write failed: here: No space",
    )
    assert len(lines) == len(reported)
    assert all(message in line for message, line in zip(reported, lines, strict=True))
    clock.now += QUIET_S - 1
    fail(guard, no_room())
    assert capsys.readouterr().err == ""
    clock.now += 1
    fail(guard, no_room())
    fail(guard, no_room())
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert guard.counts == {"log write": 8, "checkpoint write": 1}


@pytest.mark.parametrize(
    ("error", "also_catch", "caught"),
    [
        (no_room(), (), True),
        (ValueError(), (), False),
        (UnluckyError(), (ValueError,), True),
        (RuntimeError(), (Exception,), False),
        (RuntimeError(), (RuntimeError,), True),
        (NotImplementedError(), (RuntimeError,), False),
        (KeyboardInterrupt(), (Exception,), False),
        (MemoryError(), (MemoryError,), False),
        (torch.OutOfMemoryError(), (RuntimeError, torch.OutOfMemoryError), False),
        (HorovodInternalError(), (RuntimeError, HorovodInternalError), False),
        (MpiError(), (RuntimeError, MpiError), False),
    ],
)
def test_what_is_caught(error, also_catch, caught):
    guard, seen = Guard(), []
    if caught:
        fail(guard, error, also_catch=also_catch, on_failure=seen.append)
    else:
        with pytest.raises(type(error)):
            fail(guard, error, also_catch=also_catch, on_failure=seen.append)
    assert (seen, guard.counts["log write"]) == (([error], 1) if caught else ([], 0))


def test_mpis_errors_have_that_name():
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py.MPI import Exception as e; "
    program += "print(e.__module__, e.__qualname__, issubclass(e, RuntimeError))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [MpiError.__module__, MpiError.__qualname__, "True"]


def test_cpu_memory_that_torch_cannot_get_is_not_caught():
    guard = Guard()
    with pytest.raises(RuntimeError, match="memory"), guard("log write", also_catch=(RuntimeError,)):
        torch.empty(2**60, dtype=torch.uint8)
    assert guard.counts == {}


def test_a_warning_that_cannot_be_written_is_no_failure(monkeypatch):
    """Standard error may go to a file on the full disk."""
    guard = Guard()
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        fail(guard, no_room())
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert guard.counts == {"log write": 1}
