"""When groups of ranks meet: at every step, or in rounds of k (local SGD, Stich 2019; post-local, Lin et al. 2020).

In a round each group takes its own steps. Where it ends parameters, and what the optimizer remembers of them, become
their means over groups: what is evaluated or saved is always of a meeting.
"""

import time
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from hvdtrain.safety.exits import EndOfRun
from hvdtrain.sync.comm import Every, HostsComm
from hvdtrain.sync.two_level import TwoLevelSync


class Follower(Protocol):
    """A moving average of the model."""

    n_averaged: Tensor

    def follow(self, not_finite: Tensor, *, steps: int = 1) -> None:
        """Move towards the model, as far as in so many steps."""


class Rounds(Protocol):
    """All ranks call these methods together."""

    apart: bool  # whether groups take steps of their own
    waited_s: float  # for other groups, where they met last

    def begin(self, epoch: int, step: int) -> None:
        """An epoch begins, or goes on, after this step."""

    def meets(self, step: int, *, last: int) -> bool:
        """Whether all groups are together after this step, `last` being the last one of the epoch."""

    def meet(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        """Become equal after this step; why the run ends, if it does for any group."""


class EveryStep:
    """The gradients of all ranks are summed at every step: they are always together."""

    apart = False
    waited_s = 0.0

    def begin(self, epoch: int, step: int) -> None:
        pass

    def meets(self, step: int, *, last: int) -> bool:
        return True

    def meet(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        return end


EVERY_STEP: Rounds = EveryStep()


class LocalRounds:
    """Groups that meet every k steps, and at the end of an epoch."""

    apart = False
    waited_s = 0.0

    def __init__(
        self,
        comm: HostsComm,
        sync: TwoLevelSync,
        *,
        every: Every,
        optimizer: torch.optim.Optimizer,
        average: Follower | None,
        scaler: GradScaler,
    ) -> None:
        self._comm, self._sync, self._every = comm, sync, every
        self._optimizer, self._average, self._scaler = optimizer, average, scaler
        self._met_at = 0

    def begin(self, epoch: int, step: int) -> None:
        self.apart = self._sync.apart = epoch >= self._every.from_epoch
        self._met_at = step

    def meets(self, step: int, *, last: int) -> bool:
        return not self.apart or step % self._every.steps == 0 or step == last

    @torch.no_grad()
    def meet(self, step: int, end: EndOfRun | None) -> EndOfRun | None:
        if not self.apart:
            return end
        words = None if end is None else [str(end), end.status, end.reason]
        came_at_s = time.perf_counter()
        ends, shapes, scales = zip(
            *self._comm.allgather([words, _remembered(self._optimizer), self._scaler.state_dict()]), strict=True
        )
        self.waited_s = time.perf_counter() - came_at_s
        self._mean(max(shapes, key=len))
        self._scaler.load_state_dict(min(scales, key=lambda state: state.get("scale", 0.0)))
        if self._average is not None:
            self._average.follow(torch.zeros((), device=self._average.n_averaged.device), steps=step - self._met_at)
        self._met_at = step
        first = next((words for words in ends if words is not None), None)
        return None if first is None else EndOfRun(first[0], status=first[1], reason=first[2])

    def _mean(self, remembered: dict[str, bool]) -> None:
        """Parameters and what the optimizer remembers, which groups that have skipped every step have yet to make."""
        parameters: list[Tensor] = [one for group in self._optimizer.param_groups for one in group["params"]]
        tensors = list(parameters)
        for parameter in parameters:
            state = self._optimizer.state[parameter]
            for name, is_count in remembered.items():
                if name not in state:
                    state[name] = torch.zeros((), device=parameter.device) if is_count else torch.zeros_like(parameter)
                tensors.append(state[name])
        flat = torch.cat([tensor.detach().flatten().float().to(parameters[0].device) for tensor in tensors])
        self._comm.between.sum_(flat)
        flat /= self._comm.between.groups
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _remembered(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """The names of what it remembers of a parameter, and whether that is a count of steps."""
    states: list[dict[str, Any]] = list(optimizer.state.values())
    return {name: value.dim() == 0 for name, value in sorted(states[0].items())} if states else {}
