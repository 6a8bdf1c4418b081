"""Waiting for other ranks without taking the core that they may need."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

# A sum that comes sooner is no wait: each one that the watchdog is told of starts a thread, its timer.
SHORT_WAIT_S = 0.005

Waiting = Callable[[], AbstractContextManager[None]]  # entered while this rank waits for others


def wait_until(is_done: Callable[[], bool], waiting: Waiting, *, look_every_s: float) -> None:
    """Return when it is done; a longer wait is spent inside `waiting`."""
    with ExitStack() as waits:
        noted_at_s = time.monotonic() + SHORT_WAIT_S
        while not is_done():
            if time.monotonic() > noted_at_s:
                waits.enter_context(waiting())
                noted_at_s = math.inf
            time.sleep(look_every_s)
