"""Skipping a step whose mean loss is finite and far above its history, decided by each rank alone and by all alike."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.finite import SPIKE, Skipped, SpikeWatch
from hvdtrain.core.slots import Refusal, Witness
from hvdtrain.core.step import Step

# The loss travels so much smaller: in fp16, in which 65504 is the largest number, and times the scale of the loss.
_SMALLER = 2.0**-10


class SkipSpikes(Witness):
    """The mean loss travels with the gradients: it is the gradient of one more number, which is 0 and never trained.

    So ranks that step together have the same bits of the loss without another sum, and come to the same decision on
    their devices, where the recent losses are kept; the host waits for nothing. The rule is SpikeWatch's. Losses of
    skipped steps are remembered like others: what stays high becomes usual.
    """

    def __init__(self, device: torch.device) -> None:
        self._carrier = nn.Parameter(torch.zeros(1, device=device))
        self._recent = torch.full((SpikeWatch.RECENT,), math.nan, device=device)  # by step, the oldest is replaced
        self._seen = 0  # steps
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
        loss = torch.where(torch.isfinite(loss), loss, math.nan)  # which is skipped for that, and no spike
        skip = (is_known & (loss - usual > limit)).to(loss.dtype)
        self._recent[self._seen % len(self._recent)].copy_(loss)
        self._seen += 1

        def explain() -> Skipped:
            return Skipped(rank=None, source=SPIKE, loss=loss.item(), usual=usual.item())

        return Refusal(skip=skip, explain=explain)

    def state_dict(self) -> dict[str, Any]:
        """The recent losses, for a checkpoint."""
        return {"recent": self._recent.tolist(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._recent.copy_(torch.tensor(state["recent"]))
        self._seen = state["seen"]


def _expect(recent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The median of the losses that are not NaN, what a spike exceeds it by, and whether they are enough to tell."""
    count = recent.isfinite().sum()
    usual = _median(recent, count)
    deviation = SpikeWatch.ROBUST * _median((recent - usual).abs(), count)
    limit = torch.maximum(SpikeWatch.DEVIATIONS * deviation, SpikeWatch.SHARE * usual.abs()).clamp(min=SpikeWatch.LEAST)
    return usual, limit, count >= SpikeWatch.SMALLEST


def _median(values: Tensor, count: Tensor) -> Tensor:
    """Of the `count` values that are not NaN; NaN if there are none. torch's own would make the host wait."""
    middle = torch.stack([(count - 1).clamp(min=0) // 2, count // 2]).clamp(max=len(values) - 1)
    return values.sort().values.gather(0, middle).mean()  # NaN comes last
