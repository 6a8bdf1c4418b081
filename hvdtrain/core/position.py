"""Where a run stands between two steps."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Position:
    """What the loop goes on from, the same on all ranks."""

    step: int = 0  # taken or skipped so far
    epoch: int = 0  # the one at hand, from 0
    visited: int = 0  # samples of this epoch, by all ranks; once it is all of them, the evaluation is next
    cut_from: int = 0  # how many were visited when those that were left were cut into batches
    totals: dict[str, float] = field(default_factory=dict)  # sums of this epoch by name, see train.task
    train_s: float = 0.0  # spent on this epoch
