"""Ranks that talk over one of MPI's communicators, beside Horovod."""

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.ranks.comm import wait_until
from hvdtrain.ranks.sync import Waiting


class MpiMembers:
    """The ranks of a communicator; they wait politely."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.waiting: Waiting = nullcontext

    def wait(self, request: Any) -> None:
        """Return when MPI is done with a request."""
        wait_until(request.Test, self.waiting)

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
        return partial(self._sum_of, values, own := values.clone(), self.mpi.Iallreduce(own.numpy(), values.numpy()))

    def _sum_of(self, values: Tensor, own: Tensor, begun: Any) -> Tensor:  # `own` is read until then
        self.wait(begun)
        return values

    def sum_(self, values: Tensor) -> None:
        """Replace a large tensor on the host by its sum over ranks, which all wait for it."""
        with self.waiting():
            self.mpi.Allreduce(values.clone().numpy(), values.numpy())

    def joined(self, part: Tensor) -> Tensor:
        """The parts of all ranks, tensors on the host with as many elements each, one after the other."""
        whole = part.new_empty(self.size * len(part))
        with self.waiting():
            self.mpi.Allgather(part.numpy(), whole.numpy())
        return whole

    def average_(self, tensors: Iterable[Tensor]) -> None:
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floats:
            return
        flat = torch.cat([tensor.detach().flatten().float() for tensor in floats]).cpu()
        self.sum_(flat)
        flat /= self.size
        for tensor, part in zip(floats, flat.split([tensor.numel() for tensor in floats]), strict=True):
            tensor.copy_(part.view_as(tensor))
