"""What prototypes share: who is on which host, one flat tensor for many, and their place in an optimizer's step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hvdtrain.ranks.comm import LOOK_EVERY_S


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's communicators."""

    world: Any
    host: Any  # the ranks of this host
    across: Any  # the ranks with this one's place on their hosts

    @property
    def hosts(self) -> int:
        return int(self.across.size)

    def copied(self) -> "Groups":
        """The same ranks, for another thread."""
        return Groups(world=self.world.Dup(), host=self.host.Dup(), across=self.across.Dup())


def groups_of(hosts: int) -> Groups:
    """The world as so many hosts with equally many ranks, each a block of consecutive ones."""
    world = MPI.COMM_WORLD.Dup()
    per_host = world.size // hosts
    return Groups(world=world, host=world.Split(world.rank // per_host), across=world.Split(world.rank % per_host))


class Sync:
    """What all prototypes are; this one sends nothing."""

    parts_hosts = False  # whether their parameters differ until `settle`

    def __init__(self, groups: Groups, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.optimizer = groups, optimizer
        self.parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]

    def attach(self) -> None:
        """From now on every step of the optimizer goes through `sum_` and `after`."""
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(lambda *_: self.after())

    def _before(self, *_: object) -> None:
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        flat = pack(gradients)
        self.sum_(flat)
        unpack(flat, gradients)

    def sum_(self, gradients: Tensor) -> None:
        """Replace this rank's gradients, all in one, by their sum over ranks or by what stands for it."""

    def after(self) -> None:
        """The optimizer has made a step."""

    def settle(self) -> None:
        """Leave nothing under way, and the parameters of all ranks equal."""


class Alone(Sync):
    """This rank steps as if there were no other: what is left is computation."""

    def attach(self) -> None:
        pass


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All elements, one tensor after the other."""
    return torch.cat([one.detach().reshape(-1) for one in tensors])


@torch.no_grad()
def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Put them back."""
    parts = flat.split([one.numel() for one in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])


def add_up(comm: Any, values: Tensor) -> None:
    """Replace a tensor by its sum over the ranks of a communicator."""
    if comm.size > 1:
        meet(comm)
        comm.Allreduce(MPI.IN_PLACE, values.numpy())


def meet(comm: Any) -> None:
    """Sleep until all ranks are here: Open MPI's own wait takes the core that one of them may need to come."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(LOOK_EVERY_S)
