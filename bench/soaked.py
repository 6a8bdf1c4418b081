"""The program of the case `soak`: its ranks fail when a signal says so, and its watchdog fires after seconds."""

import runpy
import signal
import time
from pathlib import Path

from hvdtrain.settings.safety import watchdog

PROGRAM = Path(__file__).parents[1] / "tests/mpi/programs/every_option.py"  # on small digits, for many steps a second
RAISE, HANG = signal.SIGRTMIN, signal.SIGRTMIN + 1


class Fault(Exception):  # noqa: N818 (no code around suppresses it, as it may a RuntimeError)
    """A fault of the soak."""


def fail(*_: object) -> None:
    raise Fault


if __name__ == "__main__":
    watchdog.MIN_LIMIT_S, watchdog.SLOW_S = 1.0, 4.0
    signal.signal(RAISE, fail)
    signal.signal(HANG, lambda *_: time.sleep(3600))
    runpy.run_path(str(PROGRAM), run_name="__main__")
