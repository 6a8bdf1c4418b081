"""torch.distributed between the ranks of one replica: over mpi4py on CPUs, which opens no port, and NCCL on GPUs."""

import atexit
import io
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.ranks.wire import bits
from hvdtrain.settings.safety.calls import EXCHANGES
from hvdtrain.settings.safety.exits import BadInput

_BACKEND = "mpi4py"


class _Pending(dist.Work):
    """A pending send, receive or sum, which keeps its tensors alive."""

    def __init__(self, members: MpiMembers, name: str, request: Any, *tensors: Tensor) -> None:
        super().__init__()
        self._members, self._name, self._request, self._tensors = members, name, request, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._members.calls.record("exchange", self._name, size=self._tensors[0].nbytes):
            self._members.wait(self._request)
        return True


class _MpiBackend(dist.ProcessGroup):
    """The part of a process group that torch's pipelines and sliced layers use."""

    def __init__(self, members: MpiMembers) -> None:
        super().__init__(members.rank, members.size)  # type: ignore[call-arg]
        self._members = members

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Pending:
        return _Pending(
            self._members, f"to {to}", self._members.mpi.Isend(_host_memory(tensors[0]), to, tag), tensors[0]
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Pending:
        return _Pending(
            self._members, f"from {source}", self._members.mpi.Irecv(_host_memory(tensors[0]), source, tag), tensors[0]
        )

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Pending:  # type: ignore[override]
        [total], [values] = tensors, [tensor.clone() for tensor in tensors]
        return _Pending(
            self._members, "sum", self._members.mpi.Iallreduce(values.numpy(), total.numpy()), values, total
        )

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return _BACKEND

    # torch 2.14 needs the name of each group, and the part of it that may coalesce; in C++ this one has neither.
    group_name = _BACKEND  # type: ignore[assignment]

    def _get_backend(self, device: torch.device) -> Any:
        return self


def _host_memory(tensor: Tensor) -> Any:
    """Return the tensor's memory as bytes, for MPI: both ends have equal strides."""
    assert tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def join_replica(replica: MpiMembers, device: torch.device) -> None:
    """Make the ranks of this replica torch.distributed's world; over several hosts only on CPUs."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if device.type == "cpu":
        members = MpiMembers(replica.mpi.Dup(), group=EXCHANGES)
        members.wait_context = replica.wait_context  # set before by the watchdog

        def create(*_: Any) -> dist.ProcessGroup:
            return _MpiBackend(members)

        name = f"{_BACKEND}_{len(dist.Backend.backend_list)}"  # a name can be registered only once per process
        in_memory = dist.HashStore()  # type: ignore[attr-defined]
        dist.Backend.register_backend(name, create, devices=["cpu"])
        dist.init_process_group(name, store=in_memory, rank=replica.rank, world_size=replica.size)
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as own_folder:
        folder = Path(replica.allgather(own_folder)[0])
        store = dist.FileStore(str(folder / "store"), replica.size)  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=replica.rank, world_size=replica.size, device_id=device)
        replica.allgather(None)  # before the folder is removed
    atexit.unregister(dist.destroy_process_group)
    atexit.register(dist.destroy_process_group)  # without it two ranks of a finished run did not end


def join_replica_on_all(comm: Comm, device: torch.device, option: str, *, is_shared: bool) -> None:
    """Call `join_replica` on all ranks; BadInput if a rank of the first replica does not see the run folder.

    `option` is the option that splits replicas, `is_shared` is whether this rank sees the folder.
    """

    def require_shared() -> None:
        if comm.data.rank == 0 and not is_shared:
            raise BadInput(
                f"{option}: ranks of a replica do not share a folder. Put --runs-dir where all of them see it."
            )

    agree(comm, require_shared)
    replica = comm.replica
    assert isinstance(replica, MpiMembers)
    join_replica(replica, device)


def gather_parts(
    comm: Comm, held: Mapping[str, Any], sliced: Mapping[str, int], device: torch.device
) -> dict[str, Any]:
    """Gather the state of all ranks of rank 0's replica on rank 0, by name, in rank order; empty on other ranks.

    Tensors in `sliced` are concatenated in that dimension. Each tensor is sent as its bits, anything else as packed
    bytes, through the memory of `device`. This is a collective over all ranks.
    """
    if comm.data.rank > 0:
        return {}
    sent = {name: value.contiguous() if _is_dense(value) else _packed(value, device) for name, value in held.items()}
    descriptions = [
        [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), _is_dense(held[name])]
        for name, tensor in sent.items()
    ]
    rank_descriptions = comm.replica.allgather(descriptions)
    if comm.replica.rank > 0:
        for tensor in sent.values():
            dist.send(_octets(tensor), 0)
        return {}
    parts = {name: [value] for name, value in held.items()}
    for part, part_descriptions in enumerate(rank_descriptions[1:], start=1):
        for name, shape, dtype, is_dense in part_descriptions:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            dist.recv(_octets(tensor), part)
            if name in sliced or name not in parts:
                parts.setdefault(name, []).append(tensor if is_dense else _unpacked(tensor))
    return {name: torch.cat(values, sliced[name]) if name in sliced else values[0] for name, values in parts.items()}


def _octets(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes: NCCL has no 16-bit integers."""
    return bits(tensor).reshape(-1).view(torch.uint8)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _packed(value: Any, device: torch.device) -> Tensor:
    packed = io.BytesIO()
    torch.save(value, packed)
    return torch.frombuffer(packed.getbuffer(), dtype=torch.uint8).to(device)


def _unpacked(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
