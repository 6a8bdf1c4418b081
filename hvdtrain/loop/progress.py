"""Where a run stands between its reports: what is left to go on from when ranks are lost."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hvdtrain.core.position import Position


@dataclass(frozen=True, kw_only=True)
class Unreported:
    """What a rank knows of the steps since the last report."""

    totals: Mapping[str, float] = field(default_factory=dict)  # its own, of the steps that were taken
    unreadable: int = 0  # its own samples
    loss_spikes: int = 0  # its own
    skipped_steps: int = 0  # of all ranks


def _nothing() -> Unreported:
    return Unreported()


class Progress:
    """One rank's; the loop keeps it up to date."""

    def __init__(self, position: Position) -> None:
        self.go_on(position)

    def go_on(self, position: Position) -> None:
        """All ranks stand there."""
        self.position = position
        self.reported = position.step  # the step of the last report
        self.unreported: Callable[[], Unreported] = _nothing
        self._since_s = time.perf_counter() - position.train_s

    def took(self, step: int, visited: int) -> None:
        """A step was taken, or skipped, by all ranks."""
        self.position = replace(self.position, step=step, visited=visited)

    def mark_reported(self, position: Position) -> None:
        """All steps up to there were reported."""
        self.position, self.reported = position, position.step

    def stopped(self) -> Position:
        """Where the run stands, with its time up to now."""
        return replace(self.position, train_s=time.perf_counter() - self._since_s)
