"""The outcome of a step that the device may still be computing, and its result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hvdtrain.core.finite import SUM, Refusal, Skipped, failed_forward, rank_range
from hvdtrain.core.parts import Whole
from hvdtrain.core.task import Totals
from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.ranks.sync import GradientSync


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The decision to take or to skip a step, and its causes; tensors are on the device."""

    names: Sequence[str]  # of the totals, 'loss' first; none if another rank computes the loss
    totals: Tensor  # (names,)
    global_count: float
    trouble: Tensor  # 0, or NaN after a forward pass of this rank that was not finite
    not_finite: Tensor  # 1 if the ranks that step together skip the step because its sums were not finite
    bad_here: Tensor  # 1 if this rank sees the cause
    refusals: Sequence[Refusal]  # of witnesses; they apply if the sums are finite
    skip: Tensor  # 1 if the step is skipped for any reason


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
        outcome: Outcome,
        grad_norm: Tensor,
        *,
        comm: Comm,
        group: Members,
        part: Whole,
        how: GradientSync,
        reason: Skipped | None,
    ) -> None:
        """Start copying the results to the host.

        `group` holds the ranks that take or skip the step together. `reason` is why they skip it, if already known.
        """
        self._names, self._refusals, self._reason = outcome.names, outcome.refusals, reason
        self._comm, self._group, self._part, self._how = comm, group, part, how
        known = torch.stack([outcome.skip, outcome.not_finite, outcome.bad_here, outcome.trouble, grad_norm])
        self._values = torch.cat([outcome.totals, known.double()])
        self._copied: torch.cuda.Event | None = None
        if self._values.device.type == "cuda":
            values = self._values
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> StepDone:
        """Wait for the step and return its result; a collective over the group, to be called once.

        The ranks exchange the reason if they skipped the step.
        """
        if self._copied is not None:
            self._copied.synchronize()
        values = self._values.tolist()
        totals = dict(zip(self._names, values, strict=False))
        was_skipped, was_not_finite, bad_here, trouble, grad_norm = values[len(self._names) :]
        comm, group, part = self._comm, self._group, self._part
        skipped = self._reason
        if was_skipped and not was_not_finite:
            skipped = next(refusal.explain() for refusal in self._refusals if refusal.skip.item())
        elif was_skipped and skipped is None:
            skipped = failed_forward(comm, group, part.name_failure, totals.get("loss", 0.0), trouble)
            skipped = skipped or Skipped(rank=None, source=part.name_failed_sum(bad_here))
        self._how.end_step(overflowed=skipped is not None and skipped.source.startswith(SUM))
        if skipped is not None and group.size < comm.size:
            skipped = replace(skipped, ranks=rank_range(comm.rank - group.rank, group.size))
        return StepDone(totals=comm.replica.allgather(totals)[-1], skipped=skipped, grad_norm=grad_norm)
