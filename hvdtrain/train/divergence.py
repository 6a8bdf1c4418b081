"""Signs that a run goes wrong: steps that were skipped, losses that jump, replicas that drift apart."""

import hashlib
import statistics
from collections import Counter, deque
from dataclasses import dataclass

from torch import nn

from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import REPLICAS_DIFFER, EndOfRun


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Why all ranks skipped a step."""

    rank: int  # the first whose loss or gradients were not finite
    source: str  # 'loss', 'batch norm' (its running statistics) or 'gradients'


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A finite loss far above its own recent history."""

    step: int
    rank: int
    loss: float
    usual: float  # median of the recent losses


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
            deviation = 1.4826 * statistics.median(abs(one - usual) for one in self.recent)
            if loss - usual > max(self.DEVIATIONS * deviation, 0.5 * abs(usual)):
                spike = Spike(step=step, rank=self._rank, loss=loss, usual=usual)
        self.recent.append(loss)
        return spike


def parameter_hashes(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bits, by name."""
    return {
        name: hashlib.sha256(parameter.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def weights_hash(hashes: dict[str, str]) -> str:
    """One hash for all parameters."""
    return hashlib.sha256("".join(hashes.values()).encode()).hexdigest()


def check_replicas(comm: Comm, model: nn.Module, step: int) -> None:
    """End the run on all ranks with status 4 where a rank's parameters differ in a single bit.

    The ranks are named that differ from what most have (on a tie, from rank 0), with the first parameter that does.
    """
    hashes = parameter_hashes(model)
    wholes = comm.gather(weights_hash(hashes))
    if len(set(wholes)) == 1:
        return
    everyones = comm.gather(hashes)
    counts = Counter(wholes)
    usual = max(wholes, key=lambda whole: counts[whole])  # the first of the most frequent
    reference = everyones[wholes.index(usual)]
    odd = [rank for rank, whole in enumerate(wholes) if whole != usual]
    name = next(name for name in reference if everyones[odd[0]][name] != reference[name])
    ranks = ", ".join(str(rank) for rank in odd)
    raise EndOfRun(
        f"replicas differ after step {step}: rank {ranks} from the others, first in {name}; "
        "start again from a checkpoint before this, and check that host's memory",
        status=REPLICAS_DIFFER,
        reason="replicas differ",
    )
