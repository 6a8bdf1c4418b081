"""Signals that request the end of a run."""

import collections
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from launch.run.supervise.rank_logs import read_report

if TYPE_CHECKING:
    from launch.process import LauncherProcess

GRACE_S = 25.0  # a spot instance gives 30 s
# mpirun needs about a second to stop; with a silent host it may wait forever.
STOP_S = 5.0
# Equal signals within this time count once: a closing terminal sends SIGHUP twice, timeout(1) SIGTERM.
SAME_S = 0.3


def ignored() -> set[signal.Signals]:
    """Return the signals that this process was started to ignore: by nohup, or as a shell's job in the background."""
    return {number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN}


class Stops:
    """Handles stop signals: after the first the ranks save and stop, if they can; the second kills the run."""

    def __init__(self, *, grace_s: float) -> None:
        self.by: signal.Signals | None = None  # the first one
        self.saving = False  # the ranks were requested to save and stop
        self.is_to_restart = False  # with other hosts; False again once a signal has arrived
        self._grace_s = grace_s
        self._arrived: collections.deque[tuple[int, float]] = collections.deque()
        self._at = self._until = math.inf

    def __enter__(self) -> "Stops":
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        heard = [number for number in numbers if number not in ignored()]
        self._before = {number: signal.signal(number, self._on) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _on(self, number: int, _: FrameType | None) -> None:
        self._arrived.append((number, time.monotonic()))

    def pass_on(self, launcher: "LauncherProcess", report: Path, hand_on: Callable[[], None]) -> None:
        """Act on the signals that have arrived since the last call; `hand_on` sends SIGUSR1 to ranks that catch it."""
        while self._arrived:
            number, at = self._arrived.popleft()
            if self.by is not None:
                if number != signal.SIGUSR1 and at > self._at + SAME_S:
                    if self.is_to_restart:  # the user's first one: the ranks save already
                        self.is_to_restart, self._at = False, at
                    else:
                        self._until = -math.inf
                continue
            self.saving = read_report(report).saves
            if self.saving or number != signal.SIGUSR1:
                self.by, self._at = signal.Signals(number), at
                self._until = at + (self._grace_s if self.saving else STOP_S)
            if number == signal.SIGUSR1 and not self.saving:
                hand_on()
            else:
                launcher.signal(signal.SIGUSR1 if self.saving else signal.SIGTERM)

    def overdue(self) -> bool:
        """Return whether the ranks' time to end is over."""
        return time.monotonic() > self._until

    def stop_to_restart(self) -> None:
        """Act as if SIGTERM had arrived, unless the run is being stopped already."""
        if self.by is None and not self._arrived:
            self.is_to_restart = True
            self._on(signal.SIGTERM, None)

    def again(self) -> bool:
        """Return whether a signal has arrived since the last `pass_on`."""
        return bool(self._arrived)

    def take_late(self, *, saves: bool) -> None:
        """Let a signal stop the run that has arrived since the last `pass_on`, as the launcher had ended before.

        SIGUSR1 does so for a program that `saves`.
        """
        late = [number for number, _ in self._arrived if saves or number != signal.SIGUSR1]
        if self.by is None and late:
            self.by, self.saving = signal.Signals(late[0]), saves

    def restore(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
