"""Gradients that travel as two thin matrices each (PowerSGD, Vogels et al. 2019), by torch's own hook of its DDP.

What a step leaves out is added to the next step's gradients of the same rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hvdtrain.ranks.sync import GradientSync, Update

BeginSum = Callable[[Tensor, str], Callable[[], Any]]  # in place, under a name; what it returns waits for the sum

_FIRST = 2  # the hook's own count begins where it compresses: its DDP needs two steps before, and we do not
_LEAST_GAIN = 2  # the hook compresses what becomes less than half as large


class PowerSGD(GradientSync):
    """A GradientSync that sums approximations of the given rank, once all gradients are there; nothing overlaps."""

    def __init__(self, model: nn.Module, *, rank: int, ranks: int, begin_sum: BeginSum) -> None:
        self._ranks = ranks
        self._state = PowerSGDState(
            _SumBackend(begin_sum, ranks),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=_FIRST,
            min_compression_rate=_LEAST_GAIN,
            orthogonalization_epsilon=1e-8,
        )
        self._state.iter = _FIRST
        self._before: dict[str, Tensor] = {}  # what was remembered before this step's sum
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).mul_(self._ranks)  # the hook's is a mean
        parts = [
            part.view_as(gradient)
            for part, gradient in zip(flat.split([gradient.numel() for gradient in gradients]), gradients, strict=True)
        ]
        # The hook makes a new error, and changes the others where they lie.
        self._before = {
            name: memory[0] if name == "error" else memory[0].clone()
            for name, memory in self._memories().items()
            if memory
        }
        bucket: Any = _Bucket(flat, parts)
        powerSGD_hook(self._state, bucket).wait()
        torch._foreach_copy_(gradients, parts)

    def apply(self, update: Update) -> None:
        self.finish()
        self._forget(update.unscale())
        update.clip()
        self.step(update)

    def _forget(self, skip: Tensor) -> None:
        """Remember nothing of a step that is skipped: a NaN would come again for ever.

        This rank's own sum may be finite: the step is skipped for what another rank of the replica has.
        """
        for name, memory in self._memories().items():
            if name in self._before:
                memory[0] = torch.where(skip > 0, self._before[name], memory[0])
            elif skip.item():
                memory.clear()

    def _memories(self) -> dict[str, dict[int, Tensor]]:
        """By the number of the bucket, and there is one."""
        return {"error": self._state.error_dict, "p": self._state.p_memory_dict, "q": self._state.q_memory_dict}

    def state_dict(self) -> dict[str, Any]:
        """What this rank has left out, and the last matrices, with which the next ones begin."""
        memories = {name: memory[0] for name, memory in self._memories().items() if memory}
        return memories and {**memories, "rank": self._state.matrix_approximation_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self._parameters[0].device
        is_same_rank = state.get("rank") == self._state.matrix_approximation_rank  # else new matrices begin
        for name, memory in self._memories().items():
            if name in state and (is_same_rank or name == "error"):
                memory[0] = state[name].to(device)


def max_rank(model: nn.Module) -> int:
    """The highest rank of which a gradient of the model is worth it: it becomes less than half as large; 0 if none."""
    return max(((n * m - 1) // (_LEAST_GAIN * (n + m)) for n, m in _matrices(model)), default=0)


def count_sent_elements(model: nn.Module, rank: int | None) -> int:
    """How many numbers a rank sends for its gradients; all of them without a rank."""
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    for n, m in _matrices(model):
        low_rank_elements = min(n, m, rank or min(n, m)) * (n + m)
        if rank is not None and _LEAST_GAIN * low_rank_elements < n * m:
            elements -= n * m - low_rank_elements
    return elements


def _matrices(model: nn.Module) -> list[tuple[int, int]]:
    """Rows and columns of what is trained and has any."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [(len(parameter), parameter[0].numel()) for parameter in trained if parameter.dim() > 1]


class _Bucket:
    """What the hook asks of DDP's."""

    def __init__(self, flat: Tensor, parts: list[Tensor]) -> None:
        self.buffer, self.gradients = lambda: flat, lambda: parts
        self.index, self.is_last = lambda: 0, lambda: True


class _SumBackend(dist.ProcessGroup):
    """What the hook asks of torch.distributed."""

    def __init__(self, begin_sum: BeginSum, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]
        self._begin_sum = begin_sum

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> dist.Work:  # type: ignore[override]
        total = tensors[0]
        if len(total):
            # Horovod remembers one shape for each name.
            self._begin_sum(total, f"powersgd.{len(total)}")()
        return _FinishedWork(tensors)


class _FinishedWork(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
