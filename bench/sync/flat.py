"""One all-reduce over all ranks: what everything is compared with, and its half in fp16."""

from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from sync.groups import Sync, add_up, meet


class Flat(Sync):
    """fp32, after backward."""

    def sum_(self, gradients: Tensor) -> None:
        add_up(self.groups.world, gradients)


class Half(Sync):
    """fp16, times the number of ranks on the way, as hvdtrain's own."""

    def sum_(self, gradients: Tensor) -> None:
        ranks = self.groups.world.size
        sent = (gradients * ranks).half()
        meet(self.groups.world)
        self.groups.world.Allreduce(MPI.IN_PLACE, [sent.view(torch.int16).numpy(), MPI.SHORT], op=_ADD_HALVES)
        torch.div(sent, ranks, out=gradients)


def _add_halves(one: Any, into: Any, _: object) -> None:
    torch.frombuffer(into, dtype=torch.half).add_(torch.frombuffer(one, dtype=torch.half))


_ADD_HALVES = MPI.Op.Create(_add_halves, commute=True)
