"""Synchronization of groups in rounds of k steps (local SGD, Stich 2019; post-local SGD, Lin et al. 2020).

In a round each group steps on its own. At its end, parameters and the optimizer's state are averaged over groups.
Evaluations and checkpoints always follow a synchronization.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.every_step import EveryStep, Follower
from hvdtrain.loop.draft import Draft
from hvdtrain.parallel.sync.comm import SyncSchedule
from hvdtrain.parallel.sync.groups import Groups, GroupSums
from hvdtrain.parallel.sync.two_level import TwoLevelSync
from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.ranks.wire import at_least_float, change_together
from hvdtrain.settings.safety import errors
from hvdtrain.settings.safety.exits import EndOfRun


class LocalRounds(EveryStep):
    """Synchronizes groups every k steps, and at the end of an epoch."""

    def __init__(self, draft: Draft, sync: TwoLevelSync, sums: GroupSums, schedule: SyncSchedule) -> None:
        self._comm, self._sync, self._sums, self._schedule = draft.job.comm, sync, sums, schedule
        self._optimizer, self._average, self._scaler = draft.optimizer, draft.average, draft.scaler
        self._sum_tied = partial(draft.where.part.sum_tied, draft.job.model)
        self._synced_at = 0

    def step_group(self, comm: Comm) -> Members:
        return comm.sync_group if self.is_apart else comm

    def weight(self, global_count: float, group_count: float) -> float:
        return group_count if self.is_apart else global_count

    def follow(self, average: Follower, skip: Tensor) -> None:
        if not self.is_apart:
            average.follow(skip)

    def begin(self, epoch: int, step: int) -> None:
        self.is_apart = self._sync.is_apart = epoch >= self._schedule.from_epoch
        self._synced_at = step

    def syncs_after(self, step: int, *, last: int) -> bool:
        return not self.is_apart or step % self._schedule.steps == 0 or step == last

    @torch.no_grad()
    def sync(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        if not self.is_apart:
            return end
        end_fields = None if end is None else [type(end).__name__, str(end), end.status, end.reason]
        arrived_at_s = time.perf_counter()
        scales_here = self._scaler.state_dict(), self._sync.state_dict()
        ends, shapes, loss_scales, wire_scales = zip(
            *self._comm.allgather([end_fields, _optimizer_fields(self._optimizer), *scales_here]), strict=True
        )
        self.waited_s = time.perf_counter() - arrived_at_s
        self._mean(max(shapes, key=len))
        self._scaler.load_state_dict(_smallest(loss_scales))
        self._sync.load_state_dict(_smallest(wire_scales))
        if self._average is not None:
            self._average.follow(
                torch.zeros((), device=self._optimizer.param_groups[0]["params"][0].device),
                steps=step - self._synced_at,
            )
        self._synced_at = step
        first = next((end_fields for end_fields in ends if end_fields is not None), None)
        if first is None:
            return None
        kind, message, status, reason = first
        found: EndOfRun = getattr(errors, kind)(message, status=status, reason=reason)
        return found

    def _mean(self, optimizer_fields: dict[str, bool]) -> None:
        """Average parameters and optimizer state; a group that has skipped every step must create its state first."""
        parameters: list[Tensor] = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        tensors = list(parameters)
        for parameter in parameters:
            state = self._optimizer.state[parameter]
            for name, is_count in optimizer_fields.items():
                if name not in state:
                    state[name] = torch.zeros((), device=parameter.device) if is_count else torch.zeros_like(parameter)
                tensors.append(state[name])
        change_together(tensors, self._mean_over_groups)
        # With more than two groups the order of a sum may depend on the position, and so differ between parts.
        self._sum_tied(
            lambda parameter: [
                tensor.detach().div_(2) for tensor in (parameter, *self._optimizer.state[parameter].values())
            ]
        )

    def _mean_over_groups(self, flat: Tensor) -> Tensor:
        total = at_least_float(flat)
        self._sums.sum_(total)
        return total.div_(self._sums.groups)


def _smallest(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state with the smallest scale; any state if none has a scale."""
    return min(states, key=lambda state: state.get("scale", 0.0))


def _optimizer_fields(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Return the names of the optimizer's state per parameter, and whether each is a count of steps."""
    states: list[dict[str, Any]] = list(optimizer.state.values())
    return {name: value.dim() == 0 for name, value in sorted(states[0].items())} if states else {}


def local_rounds(draft: Draft, schedule: SyncSchedule) -> EveryStep:
    """Return rounds with this schedule; EveryStep if the ranks are not in groups."""
    data, sync = draft.job.comm.data, draft.how
    if not isinstance(data, Groups) or not isinstance(sync, TwoLevelSync):
        return EveryStep()
    return LocalRounds(draft, sync, data.sums, schedule)
