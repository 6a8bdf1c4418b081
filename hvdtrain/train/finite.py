"""Finite or not: gradients of all ranks, and losses that jump."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.ranks.comm import Group

SUM = "summed gradients"  # each rank's own were finite; in fp16 on the wire their sum overflows at 65504


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Why all ranks skipped a step."""

    rank: int  # the first whose loss or gradients were not finite; 0 stands for all where it was the SUM
    source: str  # 'loss', 'batch norm' (its running statistics), 'gradients' or SUM


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A finite loss far above its own recent history."""

    step: int
    rank: int
    loss: float
    usual: float  # median of the recent losses


def total_norm(gradients: Sequence[Tensor], group: Group, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, of which each rank of `group` holds a part; NaN and infinity come through.

    Ranks that hold the same summed gradients are no group: they come to the same norm without asking each other.
    """
    own = nn.utils.get_total_norm(gradients, norm_type=norm_type)
    if group.size == 1:
        return own
    norms = torch.tensor(group.allgather(own.item()), device=own.device)
    whole: Tensor = torch.linalg.vector_norm(norms, ord=norm_type)
    return whole


def all_finite(gradients: Sequence[Tensor], group: Group) -> bool:
    """Whether every gradient is finite, of which each rank of `group` holds a part."""
    # The largest element: the 2-norm of large finite gradients overflows.
    return bool(torch.isfinite(total_norm(gradients, group, torch.inf)))


class SpikeWatch:
    """Finds the spikes of one rank's loss.

    A loss is a spike when it exceeds the median of the last 50 by more than 8 of their robust deviations (1.4826 times
    the median absolute deviation, Rousseeuw and Croux 1993) and by half; it takes 10 losses to begin.
    """

    DEVIATIONS = 8.0
    SMALLEST = 10

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.recent: deque[float] = deque(maxlen=50)

    def see(self, step: int, loss: float) -> Spike | None:
        """Take in the finite loss of a step."""
        spike = None
        if len(self.recent) >= self.SMALLEST:
            usual = statistics.median(self.recent)
            deviation = 1.4826 * statistics.median(abs(recent - usual) for recent in self.recent)
            if loss - usual > max(self.DEVIATIONS * deviation, 0.5 * abs(usual)):
                spike = Spike(step=step, rank=self._rank, loss=loss, usual=usual)
        self.recent.append(loss)
        return spike

    def state_dict(self) -> dict[str, Any]:
        """The recent losses, for a checkpoint."""
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.recent.extend(state["recent"])
