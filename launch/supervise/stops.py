"""Signals that ask a run to end."""

import collections
import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from launch.supervise.report import read_report

if TYPE_CHECKING:
    from launch.process import Launcher

GRACE_S = 25.0  # a spot instance gives thirty seconds
# mpirun needs about a second to stop; with a silent host it may wait for ever.
STOP_S = 5.0
# Within this time two signals are one: a terminal that closes sends SIGHUP twice, timeout(1) SIGTERM.
SAME_S = 0.3


class Stops:
    """Signals that ask a run to end: at the first the ranks save and leave, if they can; the second ends it at once."""

    def __init__(self, *, grace_s: float) -> None:
        self.by: signal.Signals | None = None  # the first one
        self.saving = False  # the ranks were asked to save and leave
        self._grace_s = grace_s
        self._arrived: collections.deque[tuple[int, float]] = collections.deque()
        self._at = self._until = math.inf

    def __enter__(self) -> "Stops":
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._on) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _on(self, number: int, _: FrameType | None) -> None:
        self._arrived.append((number, time.monotonic()))

    def pass_on(self, launcher: "Launcher", report: Path) -> None:
        """Act on the signals that have arrived since the last call."""
        while self._arrived:
            number, at = self._arrived.popleft()
            if self.by is not None:
                if number != signal.SIGUSR1 and at > self._at + SAME_S:
                    self._until = -math.inf
                continue
            self.saving = read_report(report).saves
            if self.saving or number != signal.SIGUSR1:
                self.by, self._at = signal.Signals(number), at
                self._until = at + (self._grace_s if self.saving else STOP_S)
            # A SIGUSR1 that comes before the ranks can save is for them to keep.
            launcher.signal(signal.SIGUSR1 if self.saving or number == signal.SIGUSR1 else signal.SIGTERM)

    def overdue(self) -> bool:
        """Whether the ranks' time to end is up."""
        return time.monotonic() > self._until

    def restore(self) -> None:
        """Put the earlier signal handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
