"""torch.distributed between the ranks of one replica: mpi4py on CPUs, which opens no port, and NCCL on GPUs."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.sync.members import MpiMembers

_BACKEND = "mpi4py"


class _UnderWay(dist.Work):
    """A send, a receive or a sum; it keeps its tensors until then."""

    def __init__(self, members: MpiMembers, request: Any, *tensors: Tensor) -> None:
        super().__init__()
        self._members, self._request, self._tensors = members, request, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._members.wait(self._request)
        return True


class _MpiBackend(dist.ProcessGroup):
    """What torch's pipelines and sliced layers ask of a process group."""

    def __init__(self, members: MpiMembers) -> None:
        super().__init__(members.rank, members.size)  # type: ignore[call-arg]
        self._members = members

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _UnderWay:
        return _UnderWay(self._members, self._members.mpi.Isend(_memory(tensors[0]), to, tag), tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _UnderWay:
        return _UnderWay(self._members, self._members.mpi.Irecv(_memory(tensors[0]), source, tag), tensors[0])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _UnderWay:  # type: ignore[override]
        [total], [own] = tensors, [tensor.clone() for tensor in tensors]
        return _UnderWay(self._members, self._members.mpi.Iallreduce(own.numpy(), total.numpy()), own, total)

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return _BACKEND


def _memory(tensor: Tensor) -> Any:
    """The tensor's bytes as they lie, for MPI: both ends have the same strides."""
    assert tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def join_replica(replica: MpiMembers, device: torch.device) -> None:
    """Make the ranks of this replica torch.distributed's world; those of several hosts only on CPUs.

    That of GPUs was not run yet.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if device.type == "cpu":
        own = MpiMembers(replica.mpi.Dup())
        own.waiting = replica.waiting  # the watchdog's: it has begun before

        def create(*_: Any) -> dist.ProcessGroup:
            return _MpiBackend(own)

        name = f"{_BACKEND}_{len(dist.Backend.backend_list)}"  # each is registered once in a process
        in_memory = dist.HashStore()  # type: ignore[attr-defined]
        dist.Backend.register_backend(name, create, devices=["cpu"])
        dist.init_process_group(name, store=in_memory, rank=replica.rank, world_size=replica.size)
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as own_folder:
        folder = Path(replica.allgather(own_folder)[0])
        store = dist.FileStore(str(folder / "store"), replica.size)  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=replica.rank, world_size=replica.size, device_id=device)
        replica.allgather(None)  # before the folder is removed
