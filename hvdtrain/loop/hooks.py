"""What happens beside the steps of a training: records, checkpoints, limits, faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdtrain.core.pending import StepDone
from hvdtrain.core.position import Position
from hvdtrain.loop.save_points import Decision

if TYPE_CHECKING:
    from hvdtrain.loop.loop import Loop
    from hvdtrain.loop.reports import Report


@dataclass(frozen=True, kw_only=True)
class EpochDone:
    """An epoch was trained and tested; the same on all ranks."""

    epoch: int  # 1 is the first
    epochs: int  # of the run
    step: int  # the last one
    train: Mapping[str, float]  # the task's metrics, by name
    test: Mapping[str, float]
    lr: float  # of its last step, for a batch of mean size
    samples: int  # visited in it, by all ranks
    train_s: float  # without the test


class Hook:
    """Called by the loop on all ranks alike, in the order of its list; every method does nothing here.

    A hook may call collectives in each method but `begin_step` and `needs_now`, and may raise EndOfRun in those that
    say so.
    """

    def begin_epochs(self, epochs: int) -> None:
        """The run trains up to this epoch."""

    def begin_step(self, number: int) -> None:
        """Step 1, 2, ... of the run begins."""

    def needs_now(self, number: int) -> bool:
        """Whether this step must be known before the next one begins."""
        return False

    def step_known(self, number: int, done: StepDone) -> None:
        """The host knows what became of a step. May raise EndOfRun on all ranks that step together."""

    def synced(self, number: int) -> None:
        """Replicas are equal after this step. May raise EndOfRun."""

    def record(self, report: "Report") -> None:
        """A report was made."""

    def obey(self, decision: Decision, position: Position) -> None:
        """After a report, or when all ranks were asked to leave an evaluation. May raise EndOfRun."""

    def epoch_trained(self, count: int) -> None:
        """The steps of an epoch are done, of the first, second, ... one since the program has started."""

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        """It is evaluated, too."""

    def ranks_changed(self, loop: "Loop") -> None:
        """Some ranks were lost, or joined: the loop continues with those that there are now."""

    def trained(self, position: Position) -> None:
        """All epochs are done."""
