"""Hooks around the steps of a training: records, checkpoints, limits, faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hvdtrain.core.pending import StepDone
from hvdtrain.core.position import Position
from hvdtrain.loop.progress import Unreported
from hvdtrain.loop.reports import Report
from hvdtrain.loop.save_points import Decision


@dataclass(frozen=True, kw_only=True)
class EpochDone:
    """The result of an epoch that was trained and tested; equal on all ranks.

    >>> done.epoch, done.step, done.samples, list(done.test)  # of the training in the example of Training
    (1, 4, 8, ['loss'])
    """

    epoch: int  # from 1
    epochs: int  # of the run
    step: int  # the last step of the epoch
    train: Mapping[str, float]  # the task's metrics, by name
    test: Mapping[str, float]
    lr: float  # of the last step, for a batch of mean size
    samples: int  # visited in this epoch by all ranks
    train_s: float  # excludes the test


class Rate(Protocol):
    """The learning rate of each step."""

    @property
    def by_steps(self) -> bool:
        """Whether the schedule follows the run's steps and not its epochs."""

    @property
    def batch(self) -> float:
        """The mean size of an epoch's batches."""

    @property
    def total_steps(self) -> int:
        """The number of steps of the run."""

    def __call__(self, step: float, samples: float) -> float:
        """Return the rate of step 0, 1, ..., or between two steps, for a global batch of `samples`."""


class Hook:
    """Called by the loop on all ranks, in the order of the list; by default every method does nothing.

    Hooks may call collectives in each method except `begin_step` and `needs_now`. Methods that may raise EndOfRun say
    so.
    """

    def begin_epochs(self, epochs: int) -> None:
        """Called before training, with the last epoch of the run."""

    def begin_step(self, number: int) -> None:
        """Called before step 1, 2, ... of the run."""

    def needs_now(self, number: int) -> bool:
        """Return whether the result of this step is needed before the next one begins."""
        return False

    def step_known(self, number: int, done: StepDone) -> None:
        """Called when the host knows the result of a step. May raise EndOfRun on all ranks that step together."""

    def synced(self, number: int) -> None:
        """Called when replicas are equal after this step. May raise EndOfRun."""

    def record(self, report: Report) -> None:
        """Called with each report."""

    def act_on(self, decision: Decision, position: Position) -> None:
        """Called after each report, or if an evaluation ends because of a stop request. May raise EndOfRun."""

    def snapshot(self, position: Position, unreported: Unreported) -> None:
        """Called to keep the state in memory, with this rank's share of the steps since the last report."""

    def epoch_trained(self, count: int) -> None:
        """Called after the steps of an epoch, with the number of epochs since the program started."""

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        """Called after the evaluation of an epoch."""

    def trained(self, position: Position) -> None:
        """Called after the last epoch. May raise EndOfRun."""
