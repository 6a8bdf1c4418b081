"""All-reduces in place, side by side: the one that gradients take, and others to compare it with."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.exchange import join_torch
from hvdtrain.safety.exits import BadInput

InPlaceSum = Callable[[Tensor], None]  # of a contiguous float32 tensor over all ranks; returns when it is there


def horovod_sum(comm: Comm) -> InPlaceSum:
    """Horovod's sum of one named tensor, as gradients take it."""
    comm.start()

    def add(values: Tensor) -> None:
        comm.begin_sum(values, f"bandwidth.{values.numel()}")()  # Horovod remembers one shape for each name
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    return add


def mpi4py_sum(_: Comm) -> InPlaceSum:
    """MPI_Allreduce on the tensor's memory: what is below Horovod on CPUs, without Horovod."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        raise BadInput("--over mpi4py: horovodrun --gloo starts no MPI, use mpirun, or leave it out")
    from mpi4py import MPI

    def add(values: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, values.numpy())

    return add


def gloo_sum(comm: Comm) -> InPlaceSum:
    """torch.distributed's gloo, as DDP takes it on CPUs; over the loopback of one host, where ranks meet in a file."""
    if comm.local_size != comm.size:
        raise BadInput("--over gloo: its ranks meet on one host's loopback, start all of them there or leave it out")
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join_torch(comm, "gloo")

    def add(values: Tensor) -> None:
        dist.all_reduce(values)

    return add


SUMS: dict[str, Callable[[Comm], InPlaceSum]] = {"ours": horovod_sum, "mpi4py": mpi4py_sum, "gloo": gloo_sum}
