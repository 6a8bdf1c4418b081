"""Waits that leave the core to others."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

WaitContext = Callable[[], AbstractContextManager[None]]  # entered while a rank waits for others

# Time between polls of a sum. Horovod's own wait polls continuously, on a core that its thread may need: see "Waiting"
# in docs/explanation/communication.md.
LOOK_EVERY_S = 200e-6

# Shorter waits are not reported to the watchdog: each report starts a timer thread.
SHORT_WAIT_S = 0.005


def wait_until(is_done: Callable[[], bool], wait_context: WaitContext) -> None:
    """Poll until `is_done`, leaving the core free in between; enter `wait_context` if the wait is long."""
    with ExitStack() as waits:
        report_at_s = time.monotonic() + SHORT_WAIT_S
        while not is_done():
            if time.monotonic() > report_at_s:
                waits.enter_context(wait_context())
                report_at_s = math.inf
            time.sleep(LOOK_EVERY_S)
