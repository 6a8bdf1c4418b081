"""Ranks that talk over one of MPI's communicators, beside Horovod's own."""

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.ranks.comm import LOOK_EVERY_S
from hvdtrain.ranks.waits import Waiting, wait_until


class MpiMembers:
    """The ranks of a communicator; they wait politely."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.waiting: Waiting = nullcontext

    def wait(self, request: Any) -> None:
        """Return when MPI is done with a request."""
        wait_until(request.Test, self.waiting, look_every_s=LOOK_EVERY_S)

    def allgather(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        self.wait(self.mpi.Iallgather(np.array([len(text)]), lengths))
        texts = np.empty(int(lengths.sum()), dtype=np.uint8)
        self.wait(self.mpi.Iallgatherv(text, [texts, lengths]))
        return [json.loads(part.tobytes()) for part in np.split(texts, np.cumsum(lengths)[:-1])]

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        total = values.detach().to("cpu", copy=True)
        return self.begin_sum(total, name)().to(values.device)

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to replace a tensor on the host by its sum over ranks; the returned function waits for it."""
        from mpi4py import MPI

        return partial(self._sum_of, values, self.mpi.Iallreduce(MPI.IN_PLACE, values.numpy()))

    def _sum_of(self, values: Tensor, begun: Any) -> Tensor:
        self.wait(begun)
        return values

    def sum_(self, values: Tensor) -> None:
        """Replace a large tensor on the host by its sum over ranks, which all wait for it."""
        from mpi4py import MPI

        with self.waiting():
            self.mpi.Allreduce(MPI.IN_PLACE, values.numpy())

    def join_(self, parts: Tensor) -> None:
        """Give all ranks a tensor on the host of which each has its part, as many elements as the others."""
        from mpi4py import MPI

        with self.waiting():
            self.mpi.Allgather(MPI.IN_PLACE, parts.numpy())

    def average_(self, tensors: Iterable[Tensor]) -> None:
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floats:
            return
        flat = torch.cat([tensor.detach().flatten().float() for tensor in floats]).cpu()
        self.sum_(flat)
        flat /= self.size
        for tensor, part in zip(floats, flat.split([tensor.numel() for tensor in floats]), strict=True):
            tensor.copy_(part.view_as(tensor))
