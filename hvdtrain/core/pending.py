"""A step that the device may still be computing, and its result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hvdtrain.core.finite import SUM, Skipped, failed_forward, rank_range
from hvdtrain.core.slots import Refusal, Slots
from hvdtrain.core.task import Totals
from hvdtrain.ranks.comm import Members


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """This rank's result of a step."""

    totals: Totals  # sums over the rank's samples; 'loss' is not finite if the rank's forward pass failed
    skipped: Skipped | None  # equal on all ranks that step together
    grad_norm: float = math.nan  # 2-norm of the summed gradients before clipping; NaN if it was not measured


class Pending:
    """A step that the device may still be computing."""

    def __init__(
        self,
        slots: Slots,
        group: Members,
        names: Sequence[str],
        values: Tensor,
        *,
        reason: Skipped | None,
        refusals: Sequence[Refusal] = (),
    ) -> None:
        """Start copying the results to the host.

        `group` holds the ranks that take or skip the step together. `reason` is why they skip it, if already known.
        `values` are the totals by name, then the numbers that `read` unpacks. `refusals` apply if the sums are finite.
        """
        self._slots, self._group, self._names, self._reason = slots, group, names, reason
        self._refusals = refusals
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = values

    def read(self) -> StepDone:
        """Wait for the step and return its result; a collective over the group, to be called once.

        The ranks exchange the reason if they skipped the step.
        """
        if self._copied is not None:
            self._copied.synchronize()
        *totals, was_skipped, was_not_finite, bad_here, trouble, grad_norm = self._values.tolist()
        known = dict(zip(self._names, totals, strict=True))
        comm, group, where = self._slots.comm, self._group, self._slots.where
        skipped = self._reason
        if was_skipped and not was_not_finite:
            skipped = next(refusal.explain() for refusal in self._refusals if refusal.skip.item())
        elif was_skipped and skipped is None:
            skipped = failed_forward(comm, group, where, known.get("loss", 0.0), trouble)
            skipped = skipped or Skipped(rank=None, source=where.name_failed_sum(bad_here))
        self._slots.how.end_step(overflowed=skipped is not None and skipped.source.startswith(SUM))
        if skipped is not None and group.size < comm.size:
            skipped = replace(skipped, ranks=rank_range(comm.rank - group.rank, group.size))
        return StepDone(totals=where.share(known), skipped=skipped, grad_norm=grad_norm)

    def read_alone(self) -> StepDone:
        """Return the result as far as this rank knows it, without exchanging the reason of a skip."""
        if self._copied is not None:
            self._copied.synchronize()
        *totals, was_skipped, was_not_finite, _, trouble, grad_norm = self._values.tolist()
        skipped = Skipped(rank=None, source=SUM) if was_skipped else None
        self._slots.how.end_step(overflowed=bool(was_not_finite) and math.isfinite(trouble))
        return StepDone(totals=dict(zip(self._names, totals, strict=True)), skipped=skipped, grad_norm=grad_norm)
