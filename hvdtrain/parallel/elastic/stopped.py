"""Ends stopped ranks of this host: a stopped rank is not dead, and its own watchdog does not run."""

import threading
from collections.abc import Iterable
from contextlib import suppress

import psutil

LIMIT_S = 10.0
_LOOK_EVERY_S = 0.5


class StoppedNeighbours:
    """Measures how long processes of this host have been stopped, not counting stops of this process."""

    def __init__(self, pids: Iterable[int], *, limit_s: float) -> None:
        self._limit_s = limit_s
        self.set_pids(pids)

    def set_pids(self, pids: Iterable[int]) -> None:
        """Watch these processes from now on."""
        stopped_s: dict[psutil.Process, float] = {}
        for pid in pids:
            with suppress(psutil.Error):
                stopped_s[psutil.Process(pid)] = 0.0
        self._stopped_s = stopped_s

    def kill_overdue(self, since_s: float) -> None:
        """Kill processes that have been stopped longer than the limit; the last check was `since_s` ago."""
        stopped_s = self._stopped_s  # another thread may replace it
        for process, before_s in list(stopped_s.items()):
            try:
                is_stopped = process.status() == psutil.STATUS_STOPPED
                stopped_s[process] = before_s + since_s if is_stopped else 0.0
                if stopped_s[process] > self._limit_s:
                    process.kill()
            except psutil.Error:  # the process has ended
                del stopped_s[process]


def watch_neighbours(pids: Iterable[int], *, limit_s: float) -> StoppedNeighbours:
    """Start a thread that watches these processes, or those set later."""
    stopped, pause = StoppedNeighbours(pids, limit_s=limit_s), threading.Event()

    def keep_looking() -> None:
        while not pause.wait(_LOOK_EVERY_S):
            stopped.kill_overdue(_LOOK_EVERY_S)

    threading.Thread(target=keep_looking, name="stopped", daemon=True).start()
    return stopped
