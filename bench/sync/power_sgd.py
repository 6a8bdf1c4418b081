"""PowerSGD (Vogels et al. 2019): torch's own hook of its DDP, on a bucket that has what the hook asks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from sync.groups import Groups, Sync, add_up


class PowerSGD(Sync):
    """All gradients are one bucket; kernels travel as two matrices of so many columns, the rest as it is."""

    def __init__(self, groups: Groups, optimizer: torch.optim.Optimizer, *, rank: int) -> None:
        super().__init__(groups, optimizer)
        self.state = PowerSGDState(
            _MpiGroup(groups.world),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,
        )
        self.state.iter = 2  # DistributedDataParallel needs two steps before it, and we do not

    def sum_(self, gradients: Tensor) -> None:
        gradients *= self.groups.world.size  # the hook divides by it
        parts = gradients.split([one.numel() for one in self.parameters])
        bucket: Any = _Bucket(gradients, [part.view_as(one) for part, one in zip(parts, self.parameters, strict=True)])
        powerSGD_hook(self.state, bucket).wait()


class _Bucket:
    def __init__(self, flat: Tensor, gradients: list[Tensor]) -> None:
        self.buffer, self.gradients = lambda: flat, lambda: gradients
        self.index, self.is_last = lambda: 0, lambda: True


class _Done(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def get_future(self) -> Any:
        return self._future


class _MpiGroup(dist.ProcessGroup):
    """Sums over an mpi4py communicator, at once."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._comm = comm

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        add_up(self._comm, tensors[0])
        return _Done(tensors)
