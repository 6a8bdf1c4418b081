"""Decisions to save or to stop, which all ranks agree on at every step."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hvdtrain.ranks.comm import Comm


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The actions of all ranks after a step."""

    save: bool
    leave: bool  # stop the run after saving
    snapshot: bool = False  # keep the state in memory; needs no report

    @property
    def is_any(self) -> bool:
        """Return whether there is anything to do that a report precedes."""
        return self.save or self.leave


LEAVE = Decision(save=True, leave=True)


class SavePoints:
    """Decides what to do after each step, here nothing; the methods are collectives."""

    def begin(self, step: int) -> None:
        """Record that all ranks continue after this step."""

    def decide(self, step: int) -> Callable[[], Decision]:
        """Start the decision for this step, to overlap with the step; the returned function waits for the result."""
        return lambda: Decision(save=False, leave=False)

    def saved(self, held_s: float) -> None:
        """Record that a checkpoint was taken, for which the training waited `held_s` seconds."""


NEVER = SavePoints()


class AgreedSavePoints(SavePoints):
    """Saves by rank 0's clock or by steps, and stops when any rank has received a stop request."""

    def __init__(
        self,
        comm: Comm,
        leave: threading.Event,
        *,
        every_s: float,
        every_steps: int | None,
        next_s: Callable[[float], float] | None = None,
    ) -> None:
        """Decide by these events and intervals.

        `leave` is set on a rank with a stop request. `next_s` maps the seconds that a save has held the training to the
        seconds until the next save.
        """
        self._comm = comm
        self._leave = leave
        self._every_s = every_s
        self._every_steps = every_steps
        self._saved_at = time.monotonic()
        self._asked_at = 0  # the step of the last all-reduce
        self._next_s = next_s
        self.snapshot_due: Callable[[], bool] | None = None  # on all ranks if the run takes snapshots

    def begin(self, step: int) -> None:
        self._asked_at = step

    def decide(self, step: int) -> Callable[[], Decision]:
        due = self._every_s > 0 and time.monotonic() >= self._saved_at + self._every_s
        wishes = [due and self._comm.rank == 0, self._leave.is_set()]
        if self.snapshot_due is not None:
            wishes.append(self._comm.rank == 0 and self.snapshot_due())
        wait = self._comm.begin_sum(torch.tensor(wishes).int(), "save_point")
        by_steps = self._every_steps is not None and step // self._every_steps > self._asked_at // self._every_steps
        self._asked_at = step

        def decided() -> Decision:
            save, leave, *snapshot = wait().tolist()
            saves = bool(save or leave or by_steps)
            return Decision(save=saves, leave=bool(leave), snapshot=any(snapshot) and not saves)

        return decided

    def saved(self, held_s: float) -> None:
        self._saved_at = time.monotonic()
        if self._next_s is not None:
            self._every_s = self._next_s(held_s)
