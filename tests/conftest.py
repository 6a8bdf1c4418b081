"""What every test may rely on."""

import gc
import signal

import pytest

# A job in the background starts with Ctrl-C ignored, one of nohup with SIGHUP, and so would every process that a test
# of it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that is collected is garbage; to look for some takes a quarter of the time, and later as much again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
