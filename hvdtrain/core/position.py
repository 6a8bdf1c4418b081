"""The position of a run between two steps."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position from which the loop continues; equal on all ranks."""

    step: int = 0  # steps taken or skipped so far
    epoch: int = 0  # the current epoch, from 0
    visited: int = 0  # samples of this epoch visited by all ranks; the evaluation follows the last
    cut_from: int = 0  # value of `visited` when the remaining samples were last divided into batches
    totals: dict[str, float] = field(default_factory=dict)  # sums of this epoch by name, see core.task
    train_s: float = 0.0  # spent on this epoch
