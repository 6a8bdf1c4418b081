"""Finite or not: gradients of all ranks, and losses that jump."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hvdtrain.core.host_copies import copy_to_device, copy_to_host
from hvdtrain.ranks.comm import Comm, Members

if TYPE_CHECKING:
    from hvdtrain.core.slots import Layout

# No rank's forward pass has failed. If a witness looked, no rank's own gradients either: in fp16 on the
# wire their sum overflows at 65504.
SUM = "summed gradients"
SPIKE = "spike"  # finite, but far above what was usual


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Why all ranks, or a group of them that steps apart, skipped a step."""

    rank: int | None  # the first whose loss or gradients were not finite; None where it was the SUM
    source: str  # 'loss', 'batch norm' (its running statistics), 'gradients', SUM or SPIKE
    ranks: str | None = None  # who skipped it, if not all
    loss: float | None = None  # of a SPIKE: the mean over the ranks that step together
    usual: float | None = None  # the median of those before

    def to_event(self) -> dict[str, Any]:
        """As a line of metrics.jsonl has it."""
        return {name: value for name, value in asdict(self).items() if value is not None or name == "rank"}

    @property
    def what(self) -> str:
        """Where the first NaN or Inf was, or how far the loss has risen."""
        if self.source == SPIKE:
            return f"the loss spiked from about {self.usual:.4g} to {self.loss:.4g}"
        of_rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"NaN or Inf in the {self.source}{of_rank}"


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A finite loss far above its own recent history."""

    step: int
    rank: int
    loss: float
    usual: float  # median of the recent losses


def rank_range(first: int, size: int) -> str:
    """Neighbouring ranks in words."""
    return f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"


def total_norm(gradients: Sequence[Sequence[Tensor]], ranks: Members, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, of which each of `ranks` holds a part; NaN and infinity come through.

    They come in the optimizer's groups. Each tensor's norm is told, so that parts have the bits of the whole. Ranks
    that hold the same summed gradients come to the same norm without asking each other. Else the host waits once.
    """
    if ranks.size == 1:
        return nn.utils.get_total_norm([gradient for group in gradients for gradient in group], norm_type=norm_type)
    own_norms = [torch.stack(torch._foreach_norm(list(group), norm_type)) for group in gradients if group]
    copies = iter(copy_to_host(own_norms))
    parts = [next(copies).tolist() if group else [] for group in gradients]
    norms = [norm for groups in zip(*ranks.allgather(parts), strict=True) for group in groups for norm in group]
    total: Tensor = torch.linalg.vector_norm(copy_to_device(torch.tensor(norms), own_norms[0].device), ord=norm_type)
    return total


@torch.no_grad()
def not_finite(gradients: Sequence[Tensor], group: Members) -> Tensor:
    """1 where an element of the gradients is NaN or infinite, of which each rank of `group` holds a part; else 0.

    A float32 scalar on their device, which the host need not read. It is GradScaler's own check, with a scale of 1: the
    2-norm of large finite gradients overflows, and torch takes ten times as long for their largest element on a CPU.
    """
    device = gradients[0].device
    flag, scale = torch.zeros((), device=device), torch.ones((), device=device)
    for dtype in {gradient.dtype for gradient in gradients}:
        same_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, flag, scale)
    if group.size > 1:
        flag.fill_(max(group.allgather(flag.item())))
    return flag


def failed_forward(comm: Comm, group: Members, where: "Layout", loss: float, trouble: float) -> Skipped | None:
    """The first rank whose forward pass was not finite, if any; all ranks of `group`, which step together, ask.

    Batch norm over all ranks spreads one rank's trouble to all of them: then rank 0 stands for all.
    """
    source = None
    if not math.isfinite(trouble):
        source = where.name_failure("batch norm" if math.isfinite(loss) else "loss")
    sources = enumerate(group.allgather(source), start=comm.rank - group.rank)
    return next((Skipped(rank=rank, source=failure) for rank, failure in sources if failure is not None), None)


class SpikeWatch:
    """Finds the spikes of one rank's loss.

    A loss is a spike when it exceeds the median of the last 50 by more than 8 of their robust deviations (1.4826 times
    the median absolute deviation, Rousseeuw and Croux 1993), by half and by 0.1; it takes 10 losses to begin.
    """

    RECENT = 50
    DEVIATIONS, ROBUST = 8.0, 1.4826
    SHARE = 0.5
    LEAST = 0.1  # one wrong sample raises a mean cross-entropy of nearly 0 by as much, such as 64 by a sample of 6.4
    SMALLEST = 10

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.recent: deque[float] = deque(maxlen=self.RECENT)

    def see(self, step: int, loss: float) -> Spike | None:
        """Take in the finite loss of a step."""
        spike = None
        if len(self.recent) >= self.SMALLEST:
            usual = statistics.median(self.recent)
            deviation = self.ROBUST * statistics.median(abs(recent - usual) for recent in self.recent)
            if loss - usual > max(self.DEVIATIONS * deviation, self.SHARE * abs(usual), self.LEAST):
                spike = Spike(step=step, rank=self.rank, loss=loss, usual=usual)
        self.recent.append(loss)
        return spike

    def state_dict(self) -> dict[str, Any]:
        """The recent losses, for a checkpoint."""
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.recent.extend(state["recent"])
