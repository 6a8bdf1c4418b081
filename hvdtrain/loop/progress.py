"""The position of a run between its reports, which snapshots hold."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hvdtrain.core.position import Position


@dataclass(frozen=True, kw_only=True)
class Unreported:
    """A rank's knowledge of the steps since the last report."""

    totals: Mapping[str, float] = field(default_factory=dict)  # this rank's sums over steps that were taken
    unreadable: int = 0  # samples of this rank
    loss_spikes: int = 0  # of this rank
    skipped_steps: int = 0  # of all ranks


class Progress:
    """The progress of one rank, kept up to date by the loop."""

    def __init__(self, position: Position) -> None:
        self.go_on(position)

    def go_on(self, position: Position) -> None:
        """Restart from a position that all ranks share."""
        self.position = position
        self._since_s = time.perf_counter() - position.train_s

    def record_step(self, step: int, visited: int) -> None:
        """Record that all ranks have taken or skipped a step."""
        self.position = replace(self.position, step=step, visited=visited)

    def stopped(self) -> Position:
        """Return the current position, including the time up to now."""
        return replace(self.position, train_s=time.perf_counter() - self._since_s)
