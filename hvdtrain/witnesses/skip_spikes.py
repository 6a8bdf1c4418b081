"""Skips steps with a finite mean loss far above its history; all ranks decide alike without communication."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.finite import SPIKE, Refusal, Skipped, SpikeWatch
from hvdtrain.core.step import Step, Witness

# Scale of the loss on the wire: in fp16 the largest number is 65504, and the loss may also have a loss scale.
_SMALLER = 2.0**-10


class SkipSpikes(Witness):
    """Sends the mean loss with the gradients, as the gradient of an extra parameter that is 0 and never trained.

    Ranks that step together thus get the same bits of the loss without another sum, and reach the same decision on
    their devices, where the recent losses are stored; the host does not wait. The rule is SpikeWatch's. Losses of
    skipped steps are also recorded, so that a lasting increase becomes the new normal.
    """

    name = "losses"

    def __init__(self, device: torch.device) -> None:
        self._carrier = nn.Parameter(torch.zeros(1, device=device))
        self._recent = torch.full((SpikeWatch.RECENT,), math.nan, device=device)  # by step; the oldest is overwritten
        self._seen = 0  # number of steps
        self._is_carried = False

    def begin(self, step: Step) -> None:
        if not self._is_carried:
            step.slots.how.carry(self._carrier)
        self._is_carried, self._carrier.grad = True, None

    def pass_on(self, values: Tensor) -> Tensor:
        return values + (self._carrier * (_SMALLER * values.detach())).sum()

    @torch.no_grad()
    def refuse(self, step: Step) -> Refusal:
        assert self._carrier.grad is not None
        loss = self._carrier.grad[0] / (_SMALLER * step.scaler.scale(torch.ones_like(self._carrier))[0])
        usual, limit, is_known = _expect(self._recent)
        loss = torch.where(torch.isfinite(loss), loss, math.nan)  # skipped as non-finite, not as a spike
        skip = (is_known & (loss - usual > limit)).to(loss.dtype)
        self._recent[self._seen % len(self._recent)].copy_(loss)
        self._seen += 1

        def explain() -> Skipped:
            return Skipped(rank=None, source=SPIKE, loss=loss.item(), usual=usual.item())

        return Refusal(skip=skip, explain=explain)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses, for a checkpoint."""
        return {"recent": self._recent.tolist(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the recent losses."""
        self._recent.copy_(torch.tensor(state["recent"]))
        self._seen = state["seen"]


def _expect(recent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the median of the finite losses, the excess that makes a spike, and whether there are enough losses."""
    count = recent.isfinite().sum()
    usual = _median(recent, count)
    deviation = SpikeWatch.ROBUST * _median((recent - usual).abs(), count)
    limit = torch.maximum(SpikeWatch.DEVIATIONS * deviation, SpikeWatch.SHARE * usual.abs()).clamp(min=SpikeWatch.LEAST)
    return usual, limit, count >= SpikeWatch.SMALLEST


def _median(values: Tensor, count: Tensor) -> Tensor:
    """Return the median of the `count` values that are not NaN; NaN if none. torch's own would make the host wait."""
    middle = torch.stack([(count - 1).clamp(min=0) // 2, count // 2]).clamp(max=len(values) - 1)
    return values.sort().values.gather(0, middle).mean()  # NaN sorts last
