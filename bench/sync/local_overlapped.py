"""Local SGD whose averages travel while the next k steps are made (Shen et al. 2019, CoCoD-SGD)."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sync.groups import Groups, Sync, add_up, pack, unpack
from sync.two_level import mean_over_hosts


class LocalOverlapped(Sync):
    """What the mean of the parameters differs from a host's own is added k steps later; momenta stay the host's."""

    parts_hosts = True

    def __init__(self, groups: Groups, optimizer: torch.optim.Optimizer, *, every: int) -> None:
        super().__init__(groups, optimizer)
        self.every, self.steps = every, 0
        self.sent: Tensor | None = None
        self.mean: Future[Tensor] | None = None
        self.thread = ThreadPoolExecutor(1)
        self.apart = groups.copied()

    def sum_(self, gradients: Tensor) -> None:
        add_up(self.groups.host, gradients)
        gradients *= self.groups.hosts

    def after(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.correct()
            self.sent = pack(self.parameters)
            self.mean = self.thread.submit(mean_over_hosts, self.apart, self.sent)

    def correct(self) -> None:
        """Add the difference that has travelled."""
        if self.mean is not None and self.sent is not None:
            now = pack(self.parameters)
            unpack(now + self.mean.result() - self.sent, self.parameters)
            self.mean = None

    def settle(self) -> None:
        self.correct()
        unpack(mean_over_hosts(self.groups, pack(self.parameters)), self.parameters)
