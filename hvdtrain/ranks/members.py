"""Ranks that communicate over an MPI communicator, besides Horovod."""

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.ranks.comm import Comm, Members, ReplicaGroup
from hvdtrain.ranks.waits import WaitContext, wait_until
from hvdtrain.ranks.wire import at_least_float, change_together
from hvdtrain.settings.safety import calls


class MpiMembers:
    """The ranks of a communicator; they sleep while they wait."""

    def __init__(self, mpi: Any, *others: Members, group: str = calls.WORLD) -> None:
        """Wrap the MPI communicator of this `group`; `others` get the same `wait_context`."""
        self.mpi = mpi
        self.calls = calls.of_group(group)
        self.rank, self.size = mpi.rank, mpi.size
        self._wait_context: WaitContext = nullcontext
        self._others = others

    @property
    def wait_context(self) -> WaitContext:
        return self._wait_context

    @wait_context.setter
    def wait_context(self, wait_context: WaitContext) -> None:
        self._wait_context = wait_context
        for members in self._others:
            members.wait_context = wait_context

    def wait(self, request: Any) -> None:
        """Wait for an MPI request."""
        wait_until(request.Test, self.wait_context)

    def allgather(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        with self.calls.record("allgather", size=len(text)):
            self.wait(self.mpi.Iallgather(np.array([len(text)]), lengths))
            texts = np.empty(int(lengths.sum()), dtype=np.uint8)
            self.wait(self.mpi.Iallgatherv(text, [texts, lengths]))
        return [json.loads(part.tobytes()) for part in np.split(texts, np.cumsum(lengths)[:-1])]

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        total = values.detach().to("cpu", copy=True)
        with self.calls.record("all-reduce", name, size=values.nbytes):
            return self.begin_sum(total, name)().to(values.device)

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to replace a tensor on the host by its sum over ranks; the returned function waits for it."""
        summands = values.clone().numpy()
        request = self.mpi.Iallreduce(summands, values.numpy())

        def finish(_: Any = summands) -> Tensor:  # keeps them alive
            with self.calls.record("all-reduce", name, size=values.nbytes):
                self.wait(request)
            return values

        return finish

    def sum_(self, values: Tensor) -> None:
        """Replace a large flat tensor on the host by its sum over ranks; all ranks wait for it.

        MPI cannot add fp16: each rank sums a share of it in fp32.
        """
        if values.dtype != torch.float16:
            with self.calls.record("all-reduce", size=values.nbytes), self.wait_context():
                self.mpi.Allreduce(values.clone().numpy(), values.numpy())
            return
        parts = nn.functional.pad(values, (0, -len(values) % self.size)).view(self.size, -1)
        of_ranks = torch.empty_like(parts)
        with self.calls.record("all-to-all", size=values.nbytes), self.wait_context():
            self.mpi.Alltoall(_movable(parts), _movable(of_ranks))
        values.copy_(self.allgather_tensor(of_ranks.sum(0, dtype=torch.float32).half())[: len(values)])

    def allgather_tensor(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, concatenated; parts are host tensors with equal numbers of elements.

        The result is in pinned memory if the part is.
        """
        gathered = torch.empty(self.size * len(part), dtype=part.dtype, pin_memory=part.is_pinned())
        with self.calls.record("allgather", size=part.nbytes), self.wait_context():
            self.mpi.Allgather(_movable(part), _movable(gathered))
        return gathered

    def average_(self, tensors: Iterable[Tensor]) -> None:
        if floats := [tensor for tensor in tensors if tensor.is_floating_point()]:
            change_together(floats, self._mean)

    def _mean(self, flat: Tensor) -> Tensor:
        total = at_least_float(flat).cpu()
        self.sum_(total)
        return total.div_(self.size).to(flat.device)


class MeshComm(MpiMembers):
    """A Comm that uses Horovod only for `data`; communication between all ranks goes over MPI."""

    def __init__(
        self, world: Comm, mpi: Any, *, data: ReplicaGroup, replica: Members, sync_group: Members | None = None
    ) -> None:
        """Wrap the ranks of `world`; `mpi` is their communicator, and `sync_group` defaults to all of them."""
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.data, self.replica, self.sync_group = data, replica, sync_group or self
        self.gather, self.broadcast, self.start = world.gather, world.broadcast, data.start
        super().__init__(mpi, world, data, replica, *([] if sync_group is None else [sync_group]))


def _movable(values: Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor's memory as an array of a type that MPI knows."""
    return values.view(torch.int16).numpy() if values.dtype == torch.float16 else values.numpy()
