"""Gradients sent as two low-rank matrices each (PowerSGD, Vogels et al. 2019), by torch's DDP communication hook.

Each rank adds the error of its approximation to its gradients of the next step.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hvdtrain.ranks.comm import Members
from hvdtrain.ranks.sync import GradientSync, gradient_of

_FIRST = 2  # iteration at which the hook compresses; DDP needs two steps before it, this code none


class LowRankSync(GradientSync):
    """Sums low-rank approximations of gradients, once all gradients are complete; nothing overlaps."""

    def __init__(self, model: nn.Module, data: Members, *, rank: int) -> None:
        self._ranks = data.size
        self._state = PowerSGDState(
            _SumBackend(data),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=_FIRST,
            orthogonalization_epsilon=1e-8,
        )
        self._state.iter = _FIRST
        self._before: dict[str, Tensor] = {}  # the state before this step's sum
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def finish(self) -> None:
        gradients = [gradient_of(parameter) for parameter in self._parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).mul_(self._ranks)  # the hook computes a mean
        parts = [
            part.view_as(gradient)
            for part, gradient in zip(flat.split([gradient.numel() for gradient in gradients]), gradients, strict=True)
        ]
        # The hook replaces the error tensor, and changes the other tensors in place.
        self._before = {
            name: memory[0] if name == "error" else memory[0].clone()
            for name, memory in self._memories().items()
            if memory
        }
        # the part of DDP's bucket that the hook uses
        bucket: Any = SimpleNamespace(
            buffer=lambda: flat,
            gradients=lambda: [torch.atleast_1d(part) for part in parts],
            index=lambda: 0,
            is_last=lambda: True,
        )
        powerSGD_hook(self._state, bucket).wait()
        torch._foreach_copy_(gradients, parts)

    def decided(self, skip: Tensor) -> None:
        """Restore the state before a skipped step: a NaN would stay in it forever.

        This rank's sum may be finite: another rank of the replica may have caused the skip.
        """
        for name, memory in self._memories().items():
            if name in self._before:
                memory[0] = torch.where(skip > 0, self._before[name], memory[0])
            elif skip.item():
                memory.clear()

    def _memories(self) -> dict[str, dict[int, Tensor]]:
        """Return the hook's state, by bucket; there is a single bucket."""
        return {"error": self._state.error_dict, "p": self._state.p_memory_dict, "q": self._state.q_memory_dict}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error and the last matrices, from which the next ones start."""
        memories = {name: memory[0] for name, memory in self._memories().items() if memory}
        return memories and {**memories, "rank": self._state.matrix_approximation_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self._parameters[0].device
        is_same_rank = state.get("rank") == self._state.matrix_approximation_rank  # else start with new matrices
        for name, memory in self._memories().items():
            if name in state and (is_same_rank or name == "error"):
                memory[0] = state[name].to(device)


class _SumBackend(dist.ProcessGroup):
    """The part of torch.distributed that the hook uses."""

    def __init__(self, data: Members) -> None:
        super().__init__(0, data.size)  # type: ignore[call-arg]
        self._data = data

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> dist.Work:  # type: ignore[override]
        total = tensors[0]
        if len(total):
            # Horovod caches one shape per name.
            self._data.begin_sum(total, f"powersgd.{len(total)}")()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(tensors)
        work: dist.Work = _create_work_from_future(future)
        return work
