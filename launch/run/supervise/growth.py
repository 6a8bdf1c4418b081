"""Hosts that are back, or new in the hostfile, while a run has fewer ranks than it began with."""

import contextlib
import math
import threading
import time
from collections.abc import Callable

from launch.errors import LaunchError
from launch.process import stop_asking

LOOK_S = 60.0  # from the start of an attempt to the first look, and from one to the next


class Growth:
    """Looks for such hosts during an attempt; `find` probes them, in a thread."""

    def __init__(self, find: Callable[[], tuple[str, ...]]) -> None:
        self.hosts: tuple[str, ...] = ()
        self._find, self._due_s = find, time.monotonic() + LOOK_S

    def __enter__(self) -> "Growth":
        return self

    def __exit__(self, *_: object) -> None:
        if self._due_s == math.inf:
            stop_asking()

    def poll(self) -> bool:
        """Return whether there are such hosts; does not wait."""
        if time.monotonic() >= self._due_s and not self.hosts:
            self._due_s = math.inf
            threading.Thread(target=self._look, daemon=True).start()
        return bool(self.hosts)

    def _look(self) -> None:
        with contextlib.suppress(LaunchError):
            self.hosts = self._find()
        self._due_s = time.monotonic() + LOOK_S
