"""Finds the rank with non-finite gradients after the sum over ranks has replaced them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.core.finite import SUM, Skipped, failed_forward, not_finite
from hvdtrain.core.model.state import unchanged
from hvdtrain.core.pending import Outcome
from hvdtrain.core.random_state import random_state, restore_random_state
from hvdtrain.core.step import Step, Witness
from hvdtrain.core.task import Batch


@dataclass(frozen=True, kw_only=True)
class _LastPass:
    batch: Batch
    random: list[Tensor]  # the generators' states before the last pass
    bad_before: Tensor  # 1 if the gradients of the passes before it were not finite


class FindNan(Witness):
    """After a skipped step, recomputes the last pass without Horovod. The host waits for each step."""

    def __init__(self) -> None:
        self._last: _LastPass | None = None

    def begin(self, step: Step) -> None:
        self._last = None

    def begin_last_pass(self, step: Step, batch: Batch) -> None:
        gradients = [one.grad for one in step.model.parameters() if one.grad is not None]  # of this rank alone
        bad = not_finite(gradients) if gradients else torch.zeros((), device=step.device)
        self._last = _LastPass(batch=batch, random=random_state(), bad_before=bad)

    def explain(self, step: Step, outcome: Outcome) -> Skipped | None:
        """Return the first rank with a non-finite forward pass, or else with non-finite gradients."""
        last, comm, group, where = self._last, step.slots.comm, step.group, step.slots.where
        if last is None or not outcome.not_finite.item():
            return None
        step.phases.enter("other")
        failed = failed_forward(comm, group, where.part.name_failure, outcome.totals[0].item(), outcome.trouble.item())
        if failed is not None:
            return failed
        # autograd.grad bypasses the hooks that communicate.
        trainable = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
        restore_random_state(last.random)
        with unchanged(step.model.modules()):
            scaled = step.scaler.scale(where.forward(step, last.batch).loss / (outcome.global_count or 1.0))
            step.phases.enter("other")
            gradients = torch.autograd.grad(scaled, trainable, allow_unused=True)
        bad_here = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
        bad_gradients = group.allgather(bad_here or bool(last.bad_before))
        if not any(bad_gradients):
            return Skipped(rank=None, source=SUM)
        return Skipped(rank=comm.rank - group.rank + bad_gradients.index(True), source="gradients")

    def end(self, step: Step) -> None:
        self._last = None
