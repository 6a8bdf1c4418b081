"""What hvdtrain does without any option: one sum of flat buckets by Horovod."""

import torch
from torch import nn

from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.device import share_cores
from sync.groups import Groups, Sync


class Ours(Sync):
    """Begun while backward still runs, where the gradients fill more than one bucket."""

    def __init__(self, groups: Groups, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(groups, optimizer)
        comm = connect(fusion_threshold_mb=0.0, cycle_time_ms=None)
        share_cores(comm)
        comm.start()
        model = nn.ParameterList(self.parameters)
        self.buckets = comm.data.gradient_sync(model, compression="none")
        self.buckets.expect(1)

    def _before(self, *_: object) -> None:
        self.buckets.finish()
        self.buckets.expect(1)
