"""The processes that read for a rank: they end with it, however it ends, and print nothing then."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from hvdtrain.settings.safety.exits import STOP_SIGNALS

READER_OF = "_HVDTRAIN_READER_OF"  # in the environment of a reader process: its rank's process
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_QUIET = "ignore:resource_tracker"  # it cleans up after a rank, and would warn below the rank's last line


@contextmanager
def starting() -> Iterator[None]:
    """Start reader processes, which ignore stop requests, because their rank may still be saving.

    A terminal, timeout(1) and mpirun send signals to all processes of a group. The start of Python's resource tracker
    unblocks SIGINT and SIGTERM, so it is started first; it ignores both signals itself.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    sys.warnoptions.append(_QUIET)  # the tracker's command line has these
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.environ[READER_OF] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[READER_OF]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_with_rank(rank: int) -> None:
    """Let the kernel kill this process when its rank, the process with this number, ends; exit if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:
        os._exit(1)
