"""Checks for NaN and Inf in the gradients of all ranks, and detection of loss spikes."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.host_copies import copy_to_device, copy_to_host
from hvdtrain.ranks.comm import Comm, Members

# Every rank's forward pass was finite, and so were each rank's gradients if a witness checked them. With fp16 on the
# wire, the sum overflows at 65504.
SUM = "summed gradients"
SPIKE = "spike"  # finite, but far above the recent losses


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Why all ranks, or the ranks of a group that steps on its own, skipped a step."""

    rank: int | None  # the first rank with a non-finite loss or gradient; None for SUM
    source: str  # 'loss', 'batch norm' (its running statistics), 'gradients', SUM or SPIKE
    ranks: str | None = None  # the ranks that skipped the step, if not all
    votes: int | None = None  # for a SPIKE: the ranks that saw one in their own losses

    def to_event(self) -> dict[str, Any]:
        """Return the fields for an event line of metrics.jsonl."""
        return {name: value for name, value in asdict(self).items() if value is not None or name == "rank"}

    @property
    def what(self) -> str:
        """Describe where the first NaN or Inf was, or how many ranks saw a spike."""
        if self.source == SPIKE:
            return f"the loss spiked on {self.votes} {'rank' if self.votes == 1 else 'ranks'}"
        of_rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"NaN or Inf in the {self.source}{of_rank}"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A witness's decision about a step with finite sums."""

    skip: Tensor  # 1 if the ranks that step together skip it, else 0; equal on all of them
    explain: Callable[[], Skipped]  # returns the reason, once the device has finished the step


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A finite loss far above its own recent history."""

    step: int
    rank: int
    loss: float
    usual: float  # median of the recent losses
    samples: list[int]  # numbers of the rank's samples in the training split


def rank_range(first: int, size: int) -> str:
    """Describe a range of consecutive ranks, for example `ranks 4 to 7`."""
    return f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"


def total_norm(gradients: Sequence[Sequence[Tensor]], ranks: Members) -> Tensor:
    """Return the 2-norm of all gradients, which may be split over `ranks`; NaN and infinity propagate.

    `gradients` holds one sequence per optimizer group. Ranks exchange the norm of each tensor, so that a split model
    gives the same bits as an unsplit one. Ranks with the same summed gradients compute the same norm without
    communication. With split gradients the host waits for the device once.
    """
    if ranks.size == 1:
        return nn.utils.get_total_norm([gradient for group in gradients for gradient in group])
    own_norms = [torch.stack(torch._foreach_norm(list(group))) for group in gradients if group]
    copies = iter(copy_to_host(own_norms))
    parts = [next(copies).tolist() if group else [] for group in gradients]
    norms = [norm for groups in zip(*ranks.allgather(parts), strict=True) for group in groups for norm in group]
    total: Tensor = torch.linalg.vector_norm(copy_to_device(torch.tensor(norms), own_norms[0].device))
    return total


@torch.no_grad()
def not_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return 1 if an element of the gradients is NaN or infinite, else 0.

    The result is a float32 scalar on the gradients' device, which the host does not have to read. The check is
    GradScaler's, with a scale of 1: the 2-norm of large finite gradients overflows, and torch takes ten times as long
    for the largest element on a CPU.
    """
    device = gradients[0].device
    flag, scale = torch.zeros((), device=device), torch.ones((), device=device)
    for dtype in {gradient.dtype for gradient in gradients}:
        same_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, flag, scale)
    return flag


def failed_forward(
    comm: Comm, group: Members, name_failure: Callable[[str], str], loss: float, trouble: float
) -> Skipped | None:
    """Return the first rank with a non-finite forward pass, if any; `name_failure` is that of this rank's part.

    This is a collective over `group`, whose ranks step together. Batch norm over all ranks spreads a NaN of one rank to
    all of them; rank 0 is reported then.
    """
    source = None
    if not math.isfinite(trouble):
        source = name_failure("batch norm" if math.isfinite(loss) else "loss")
    sources = enumerate(group.allgather(source), start=comm.rank - group.rank)
    return next((Skipped(rank=rank, source=failure) for rank, failure in sources if failure is not None), None)


class SpikeWatch:
    """Detects spikes in the loss of one rank.

    A loss is a spike if it exceeds the median of the last 50 losses by more than 8 of their robust deviations (1.4826
    times the median absolute deviation, Rousseeuw and Croux 1993), by more than the median, by more than 0.1, and by
    more than five wrong samples of the batch cost. Detection starts after 10 losses.
    """

    RECENT = 50
    DEVIATIONS, ROBUST = 8.0, 1.4826
    SHARE = 1.0
    LEAST, WRONG = 0.1, 32.0  # a sum of cross-entropies near 0 rises by about 6 with each wrong sample
    SMALLEST = 10

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.recent: deque[float] = deque(maxlen=self.RECENT)

    def see(self, step: int, loss: float, count: float, samples: Sequence[Tensor] = ()) -> Spike | None:
        """Record the finite mean loss over `count`, of a step with these samples (N,); return the spike if it is one.

        `count` are the samples of the loss, or their tokens.
        """
        spike = None
        if len(self.recent) >= self.SMALLEST:
            usual = statistics.median(self.recent)
            deviation = self.ROBUST * statistics.median(abs(recent - usual) for recent in self.recent)
            least = max(self.LEAST, self.WRONG / count)
            if loss - usual > max(self.DEVIATIONS * deviation, self.SHARE * abs(usual), least):
                numbers = [number for some in samples for number in some.tolist()]
                spike = Spike(step=step, rank=self.rank, loss=loss, usual=usual, samples=numbers)
        self.recent.append(loss)
        return spike

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses, for a checkpoint."""
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the recent losses."""
        self.recent.extend(state["recent"])
