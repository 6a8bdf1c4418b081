"""Skips steps in which a rank's finite loss is far above its history; all ranks decide alike."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.finite import SPIKE, Refusal, Skipped, SpikeWatch
from hvdtrain.core.step import Step, Witness
from hvdtrain.core.task import Batch, Sums, total


class SkipSpikes(Witness):
    """Sends each rank's vote, 0 or 1, with the gradients, as the gradient of a parameter that is 0 and never trained.

    A rank votes by its own loss and history, on its device: one rank of many hardly moves their mean. Ranks that step
    together get the same sum of votes without another all-reduce, and the host does not wait. The rule is SpikeWatch's.
    Losses of skipped steps are also recorded, so that a lasting increase becomes the new normal.
    """

    name, is_own = "losses", True

    def __init__(self, device: torch.device) -> None:
        self._carrier = nn.Parameter(torch.zeros(1, device=device))
        self._carrier.register_hook(self._vote)
        self._sums: list[Sums] = []  # of the passes of a step
        self._loss = torch.zeros((), device=device)
        self._recent = torch.full((SpikeWatch.RECENT,), math.nan, device=device)  # by step; the oldest is overwritten
        self._seen = 0  # number of steps
        self._is_carried = self._is_last = False

    def begin(self, step: Step) -> None:
        if not self._is_carried:
            step.slots.how.carry(self._carrier)
        self._is_carried, self._carrier.grad = True, None
        self._sums, self._is_last = [], False

    def begin_last_pass(self, step: Step, batch: Batch) -> None:
        self._is_last = True

    def pass_on(self, values: Tensor) -> Tensor:
        return values + self._carrier.sum()

    def see(self, sums: Sums) -> None:
        self._sums.append(Sums(loss=sums.loss.detach(), count=sums.count))

    @torch.no_grad()
    def _vote(self, gradient: Tensor) -> Tensor:
        """Replace the carrier's gradient by this rank's vote, in the last pass of a step."""
        if not self._is_last:
            return torch.zeros_like(gradient)
        loss, count = total(self._sums)[1].float().unbind()
        loss = loss / count
        self._loss = torch.where(torch.isfinite(loss), loss, math.nan)  # skipped as non-finite, not as a spike
        usual, limit, is_known = _expect(self._recent, count)
        return (is_known & (self._loss - usual > limit)).to(gradient.dtype).view(1)

    @torch.no_grad()
    def refuse(self, step: Step) -> Refusal:
        assert self._carrier.grad is not None
        votes = self._carrier.grad[0].nan_to_num(posinf=step.group.size)  # fp16 has overflowed
        self._recent[self._seen % len(self._recent)].copy_(self._loss)
        self._seen += 1

        def explain() -> Skipped:
            return Skipped(rank=None, source=SPIKE, votes=round(votes.item()))

        return Refusal(skip=(votes > 0).to(votes.dtype), explain=explain)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses, for a checkpoint."""
        return {"recent": self._recent.tolist(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the recent losses."""
        self._recent.copy_(torch.tensor(state["recent"]))
        self._seen = state["seen"]


def _expect(recent: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the median of the finite losses, the excess that makes a spike, and whether there are enough losses."""
    count = recent.isfinite().sum()
    usual = _median(recent, count)
    deviation = SpikeWatch.ROBUST * _median((recent - usual).abs(), count)
    limit = torch.maximum(SpikeWatch.DEVIATIONS * deviation, SpikeWatch.SHARE * usual.abs())
    limit = torch.maximum(limit, (SpikeWatch.WRONG / samples).clamp(min=SpikeWatch.LEAST))
    return usual, limit, count >= SpikeWatch.SMALLEST


def _median(values: Tensor, count: Tensor) -> Tensor:
    """Return the median of the `count` values that are not NaN; NaN if none. torch's own would make the host wait."""
    middle = torch.stack([(count - 1).clamp(min=0) // 2, count // 2]).clamp(max=len(values) - 1)
    return values.sort().values.gather(0, middle).mean()  # NaN sorts last
