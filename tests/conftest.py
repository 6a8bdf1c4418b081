"""What every test may rely on."""

import gc
import os
import signal
from pathlib import Path

import pytest

import tests.mpi.start.sitecustomize  # noqa: F401  torchvision brings torch's compiler, which few tests need

TESTS = Path(__file__).parent

# Neither does a process that a test starts with this environment.
os.environ["PYTHONPATH"] = f"{TESTS / 'mpi' / 'start'}:{TESTS.parent}"

# A job in the background starts with Ctrl-C ignored, and so would every process that a test of it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that is collected is garbage; to look for some takes a quarter of the time, and later as much again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
