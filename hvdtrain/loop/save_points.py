"""When to save and whether to leave: agreed on by all ranks at every step."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hvdtrain.ranks.comm import Comm


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do after a step."""

    save: bool
    leave: bool  # the run, once it is saved
    regroup: bool = False  # with ranks that are ready to join

    @property
    def is_any(self) -> bool:
        """Whether anything is to be done."""
        return self.save or self.leave or self.regroup


LEAVE = Decision(save=True, leave=True)


class SavePoints(Protocol):
    """What to do after each step; all ranks call these methods together."""

    def decide(self, step: int) -> Callable[[], Decision]:
        """Begin to agree on what to do after this step, hidden behind it; what is returned waits for the answer."""

    def saved(self, held_s: float) -> None:
        """A checkpoint was taken now, for which the training has waited `held_s`."""


class _Never:
    def decide(self, step: int) -> Callable[[], Decision]:
        return lambda: Decision(save=False, leave=False)

    def saved(self, held_s: float) -> None:
        pass


NEVER: SavePoints = _Never()


class AgreedSavePoints:
    """Saves by rank 0's clock or by steps, and leaves when any rank has been asked to."""

    def __init__(
        self,
        comm: Comm,
        leave: threading.Event,
        *,
        every_s: float,
        every_steps: int | None,
        newcomers: threading.Event | None = None,
        next_s: Callable[[float], float] | None = None,
    ) -> None:
        """`leave` is set on a rank that was asked to, `newcomers` on rank 0 when some are ready.

        After a save that has held the training for some seconds, `next_s` of them is the time to the next.
        """
        self._comm = comm
        self._leave = leave
        self._every_s = every_s
        self._every_steps = every_steps
        self._saved_at = time.monotonic()
        self._asked_at: int | None = None  # the step of the last question
        self._newcomers = newcomers
        self._next_s = next_s

    def decide(self, step: int) -> Callable[[], Decision]:
        due = self._every_s > 0 and time.monotonic() >= self._saved_at + self._every_s
        regroup = self._newcomers is not None and self._newcomers.is_set()
        wait = self._comm.begin_sum(
            torch.tensor([due and self._comm.rank == 0, self._leave.is_set(), regroup]).int(), "save_point"
        )
        before = step - 1 if self._asked_at is None else self._asked_at
        by_steps = self._every_steps is not None and step // self._every_steps > before // self._every_steps
        self._asked_at = step

        def decided() -> Decision:
            save, leave, regroup = wait().tolist()
            return Decision(save=bool(save or leave or by_steps), leave=bool(leave), regroup=bool(regroup))

        return decided

    def saved(self, held_s: float) -> None:
        self._saved_at = time.monotonic()
        if self._next_s is not None:
            self._every_s = self._next_s(held_s)

    def go_on(self) -> None:
        """There are other ranks, perhaps lost between their questions."""
        self._asked_at = None
