"""torch.distributed's NCCL between the two ranks of a replica, of which one is there.

Each call is given to a stream of its own, which waits for the caller's current stream; `wait` lets the current stream
wait for it, and the host goes on (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simgpu.simulator.gpu import Gpu
from tests.simgpu.simulator.streams import Event

RANKS = 2
GRADIENT = 0.01  # what comes where nothing was sent: each element of it


class _Given(dist.Work):
    """A kernel of NCCL's; it keeps its tensors until the caller waits."""

    def __init__(self, gpu: Gpu, done: Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._gpu, self._done, self._tensors = gpu, done, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait(self._gpu.stream)
        self._tensors = []
        return True


class Nccl(dist.ProcessGroup):
    """This rank; `coming` is what the other one sends, and `sent` what this one does, in turn and on the host."""

    group_name = "simulated"  # type: ignore[assignment]  # torch 2.14 asks for it, and for the part that may coalesce

    def __init__(self, gpu: Gpu, rank: int, coming: Iterator[Tensor]) -> None:
        super().__init__(rank, RANKS)
        self._gpu, self._stream, self._coming = gpu, gpu.new_stream(), coming
        self.sent: list[Tensor] = []

    def send(self, tensors: list[Tensor], *_: Any) -> _Given:
        def read(tensor: Any) -> None:
            self.sent.append(tensor.clone().inner)

        return self._give(tensors, read)

    def recv(self, tensors: list[Tensor], *_: Any) -> _Given:
        def write(tensor: Any) -> None:
            value = next(self._coming, None)
            tensor.fill_(GRADIENT)
            if value is not None:
                tensor.inner.copy_(value)

        return self._give(tensors, write)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Given:  # type: ignore[override]
        return self._give(tensors, lambda tensor: tensor.mul_(RANKS))

    @torch.no_grad()
    def _give(self, tensors: list[Tensor], kernel: Callable[[Any], object]) -> _Given:
        ready, done = self._gpu.new_event(), self._gpu.new_event()
        ready.record()
        with self._stream:
            ready.wait()
            for tensor in tensors:
                kernel(tensor)
            done.record()
        return _Given(self._gpu, done, tensors)

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return "simulated"


def join(group: Nccl) -> None:
    """Make it torch.distributed's world."""
    name = f"simulated_{len(dist.Backend.backend_list)}"  # each is registered once in a process
    dist.Backend.register_backend(name, lambda *_: group, devices=["cuda"])
    in_memory = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(name, store=in_memory, rank=group.rank(), world_size=RANKS)
