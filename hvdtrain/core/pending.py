"""A step that the device may still be at, and what became of it."""

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
    """This rank's part of a step."""

    totals: Totals  # sums over its samples; 'loss' is not finite where the rank's forward pass failed
    skipped: Skipped | None  # the same on all ranks that step together
    grad_norm: float = math.nan  # 2-norm of the summed gradients before clipping; NaN where it was not measured


class Pending:
    """A step that the device may still be at."""

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
        """`group` are the ranks that take or skip the step together, `reason` is why they skip it, if that is known.

        `values` are the totals by name, then what is named in `read`; `refusals` are for a step whose sums are finite.
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
        """Wait for the step, once; the ranks of the group do so together, and exchange why they have skipped it."""
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
        """The same as this rank knows it, without asking the others why they have skipped the step."""
        if self._copied is not None:
            self._copied.synchronize()
        *totals, was_skipped, was_not_finite, _, trouble, grad_norm = self._values.tolist()
        skipped = Skipped(rank=None, source=SUM) if was_skipped else None
        self._slots.how.end_step(overflowed=bool(was_not_finite) and math.isfinite(trouble))
        return StepDone(totals=dict(zip(self._names, totals, strict=True)), skipped=skipped, grad_norm=grad_norm)
