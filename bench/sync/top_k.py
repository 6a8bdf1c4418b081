"""The largest elements of each rank's gradients, gathered, with error feedback (Stich et al. 2018)."""

import torch
from torch import Tensor

from sync.groups import Groups, Sync, meet


class TopK(Sync):
    """What is not sent is added to the next step's gradients."""

    def __init__(self, groups: Groups, optimizer: torch.optim.Optimizer, *, share: float) -> None:
        super().__init__(groups, optimizer)
        self.share = share
        self.rest: Tensor | None = None

    def sum_(self, gradients: Tensor) -> None:
        world = self.groups.world
        if self.rest is not None:
            gradients += self.rest
        places = gradients.abs().topk(round(self.share * len(gradients)), sorted=False).indices
        values = gradients[places]
        self.rest = gradients.index_fill(0, places, 0.0)
        all_places = torch.empty(world.size, len(places), dtype=torch.int32)
        all_values = torch.empty(world.size, len(places))
        meet(world)
        world.Allgather(places.int().numpy(), all_places.numpy())
        world.Allgather(values.numpy(), all_values.numpy())
        gradients.zero_().index_add_(0, all_places.view(-1), all_values.view(-1))
