"""Limits that end a run before its last epoch."""

from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.core.finite import SPIKE
from hvdtrain.core.pending import StepDone
from hvdtrain.core.position import Position
from hvdtrain.core.replicas import check_replicas
from hvdtrain.core.step import Step
from hvdtrain.loop.hooks import Hook
from hvdtrain.loop.save_points import Decision
from hvdtrain.settings.safety.exits import FAILED, TOO_MANY_SKIPPED, EndOfRun


class Limits(Hook):
    """Ends a run after too many skipped steps in a row, differing replicas, or too many unreadable samples."""

    def __init__(
        self,
        step: Step,
        *,
        max_skipped_steps: int,
        check_replicas_every: int,
        most: Mapping[str, int] | None = None,
        counts: Callable[[], Mapping[str, Any]] = dict,
        hint: str = "look at the data of all ranks",
    ) -> None:
        """Set the limits; `most` limits entries of `counts`, the counts of the run's result such as unreadable_images.

        `hint` is advice for finding the rank with the non-finite gradients, if it is unknown.
        """
        self._hint = hint
        self.step = step
        self._max_skipped_steps = max_skipped_steps
        self._check_replicas_every = check_replicas_every
        self._check_all = False  # at the next synchronization of all ranks
        self._most, self._counts = most or {}, counts
        self.skipped_in_a_row = 0

    def step_known(self, number: int, done: StepDone) -> None:
        """Raise EndOfRun on all ranks that step together if a limit is reached after step 1, 2, ..."""
        step, skipped = self.step, done.skipped
        comm, group = step.slots.comm, step.group
        is_checked = bool(self._check_replicas_every) and number % self._check_replicas_every == 0
        self._check_all |= is_checked and group.size < comm.size  # of all groups, even if one ends here
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped and self.skipped_in_a_row >= self._max_skipped_steps:
            remedy = self._hint if skipped.rank is None else "check that rank's data"
            if skipped.source == SPIKE:
                remedy = "go back by --resume-from STEP to a checkpoint before it"
            raise EndOfRun(
                f"{self.skipped_in_a_row} steps in a row skipped, up to step {number}: {skipped.what}. Lower --lr, set "
                f"--clip-norm, or {remedy}.",
                status=TOO_MANY_SKIPPED,
                reason="too many skipped steps",
            )
        if is_checked:
            check_replicas(comm, step.slots.where, step.model, number, group=group)

    def synced(self, number: int) -> None:
        """Raise EndOfRun on all ranks if groups differ after their synchronization."""
        if self._check_all:
            check_replicas(self.step.slots.comm, self.step.slots.where, self.step.model, number)
        self._check_all = False

    def needs_now(self, number: int) -> bool:
        last_chance = self.skipped_in_a_row + 1 >= self._max_skipped_steps
        return last_chance or bool(self._check_replicas_every and number % self._check_replicas_every == 0)

    def act_on(self, decision: Decision, position: Position) -> None:
        """Raise EndOfRun on all ranks if more samples than allowed could not be read."""
        counts = self._counts()
        for name, most in self._most.items():
            if counts[name] > most:
                unit = name.removeprefix("unreadable_")
                raise EndOfRun(
                    f"{counts[name]} {unit} could not be decoded, more than the {most} that a run may have. Repair "
                    "the data; each rank has named its first on standard error.",
                    status=FAILED,
                    reason=f"too many unreadable {unit}",
                )

    def trained(self, position: Position) -> None:
        """Raise EndOfRun on all ranks if every step of the run was skipped on all of them."""
        if position.step and min(self.step.slots.comm.allgather(self.skipped_in_a_row)) >= position.step:
            raise EndOfRun(
                f"all {position.step} steps were skipped, so the model has learned nothing. Lower --lr, set "
                f"--clip-norm, or {self._hint}.",
                status=FAILED,
                reason="all steps skipped",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consecutive skipped steps, for a checkpoint."""
        return {"skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of consecutive skipped steps."""
        self.skipped_in_a_row = state["skipped_in_a_row"]
