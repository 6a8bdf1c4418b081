"""The sum of step n is applied at step n + 1, and travels while that one computes."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sync.groups import Groups, Sync, add_up


class Delayed(Sync):
    """The first step has no gradient, and the last sum is not used."""

    def __init__(self, groups: Groups, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(groups, optimizer)
        self.world = groups.copied().world  # for the thread alone
        self.thread = ThreadPoolExecutor(1)
        self.coming: tuple[Tensor, Future[None]] | None = None

    def sum_(self, gradients: Tensor) -> None:
        last, self.coming = self.coming, None
        own = gradients.clone()
        gradients.zero_()
        if last is not None:
            last[1].result()
            gradients.copy_(last[0])
        self.coming = own, self.thread.submit(add_up, self.world, own)

    def settle(self) -> None:
        if self.coming is not None:
            self.coming[1].result()
            self.coming = None
