"""Local SGD: gradients are averaged inside the host at every step, parameters and momenta between hosts every k.

Post-local: Lin et al. 2020. Outer momentum: Wang et al. 2020 (SlowMo).
"""

import torch
from torch import Tensor

from sync.groups import Groups, Sync, add_up, pack, unpack
from sync.two_level import mean_over_hosts


class Local(Sync):
    """The sum inside the host stands for the sum of all."""

    parts_hosts = True

    def __init__(
        self,
        groups: Groups,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        flat_steps: int = 0,
        momenta: bool = True,
        outer_momentum: float = 0.0,
    ) -> None:
        """`flat_steps` come first, summed over all ranks; without `momenta` each host keeps its own."""
        super().__init__(groups, optimizer)
        self.every, self.flat_steps, self.momenta, self.outer_momentum = every, flat_steps, momenta, outer_momentum
        self.steps = 0
        self.anchor, self.speed = pack(self.parameters), torch.zeros(())

    def sum_(self, gradients: Tensor) -> None:
        if self.steps < self.flat_steps:
            add_up(self.groups.world, gradients)
        else:
            add_up(self.groups.host, gradients)
            gradients *= self.groups.hosts

    def after(self) -> None:
        self.steps += 1
        if self.steps <= self.flat_steps:
            self.anchor = pack(self.parameters) if self.steps == self.flat_steps else self.anchor
        elif (self.steps - self.flat_steps) % self.every == 0:
            self.settle()

    def settle(self) -> None:
        tensors = list(self.parameters)
        if self.momenta:
            tensors += [self.optimizer.state[one]["momentum_buffer"] for one in self.parameters]
        mean = mean_over_hosts(self.groups, pack(tensors))
        if self.outer_momentum:
            moved = mean[: len(self.anchor)]
            self.speed = self.outer_momentum * self.speed + moved - self.anchor
            moved.copy_(self.anchor + self.speed)
            self.anchor = moved.clone()
        unpack(mean, tensors)
