"""Bandwidth of links between ranks: concurrent all-reduces, and exchanges between two ranks."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput

InPlaceSum = Callable[[Tensor], None]  # sums a contiguous float32 tensor over all ranks; returns when complete

# Arguments: a contiguous float32 tensor, a buffer for the other rank's tensor, and that rank; returns when both are
# complete.
Exchange = Callable[[Tensor, Tensor, int], None]

# With several hosts each is measured with at most this number of others: up to 16 hosts, with all.
MOST_ROUNDS = 15


def horovod_sum(comm: Comm) -> InPlaceSum:
    """Return Horovod's sum of one named tensor, as used for gradients."""
    comm.start()

    def add(values: Tensor) -> None:
        comm.begin_sum(values, f"bandwidth.{values.numel()}")()  # Horovod caches one shape per name
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    return add


def mpi4py_sum(_: Comm) -> InPlaceSum:
    """Return MPI_Allreduce on the tensor's memory, which Horovod uses on CPUs; works without Horovod."""
    mpi = _require_mpi("--over mpi4py", "mpi4py")

    def add(values: Tensor) -> None:
        mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, values.numpy())

    return add


def _require_mpi(option: str, remedy: str) -> Any:
    """Return mpi4py's module; BadInput without MPI."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        raise BadInput(f"{option}: horovodrun --gloo starts no MPI. Use mpirun, or leave {remedy} out.")
    from mpi4py import MPI

    return MPI


def gloo_sum(comm: Comm) -> InPlaceSum:
    """Return torch.distributed's sum by Gloo, as in DDP on CPUs; on one host over loopback, with a file rendezvous."""
    if comm.local_size != comm.size:
        raise BadInput(
            "--over gloo: works on one host only, over its loopback. Start all ranks on one host, or leave gloo out."
        )
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join_torch(comm, "gloo")

    def add(values: Tensor) -> None:
        dist.all_reduce(values)

    return add


SUMS: dict[str, Callable[[Comm], InPlaceSum]] = {"ours": horovod_sum, "mpi4py": mpi4py_sum, "gloo": gloo_sum}


def make_exchange(comm: Comm, device: torch.device) -> Exchange:
    """Return an exchange over NCCL between GPUs, or by MPI_Sendrecv on the tensors' memory between CPUs."""
    if device.type == "cuda":
        return make_torch_exchange(comm, "nccl")
    mpi = _require_mpi("--pairs", "--pairs")

    def exchange(values: Tensor, received: Tensor, partner: int) -> None:
        mpi.COMM_WORLD.Sendrecv(values.numpy(), dest=partner, recvbuf=received.numpy(), source=partner)

    return exchange


def make_torch_exchange(comm: Comm, backend: str) -> Exchange:
    """Return an exchange by torch.distributed: a send and a receive in one NCCL group call."""
    import torch.distributed as dist

    join_torch(comm, backend)

    def exchange(values: Tensor, received: Tensor, partner: int) -> None:
        transfers = [dist.P2POp(dist.isend, values, partner), dist.P2POp(dist.irecv, received, partner)]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    return exchange


def join_torch(comm: Comm, backend: str) -> None:
    """Join the ranks in torch.distributed: through a file on one host, over the network of hvdlaunch on several."""
    import torch.distributed as dist

    if comm.local_size != comm.size:
        if "MASTER_ADDR" not in os.environ:
            raise BadInput(
                "ranks on several hosts: MASTER_ADDR is not set, so they cannot connect. Start them with hvdlaunch run."
            )
        dist.init_process_group(backend, rank=comm.rank, world_size=comm.size)
        dist.barrier()  # NCCL requires all ranks in its first call
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as own_folder:
        folder = Path(comm.broadcast(own_folder.encode()).decode())
        store = dist.FileStore(str(folder / "store"), comm.size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
        dist.barrier()
        comm.allgather(None)  # before the folder is removed


def pair_rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of ranks to measure; `hosts` is indexed by rank, and the pairs of a round run together.

    On one host, every two ranks form a round of their own, because links inside a host share hardware. With several
    hosts, the first ranks of every two hosts form the pairs; each host is in at most one pair per round, so that no
    pair shares a network card.
    """
    first_ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(first_ranks) == 1:
        return [[(a, b)] for a in range(len(hosts)) for b in range(a + 1, len(hosts))]
    ring: list[int | None] = [*first_ranks, None] if len(first_ranks) % 2 else [*first_ranks]
    pairs = []
    for _ in range(min(len(ring) - 1, MOST_ROUNDS)):  # the circle method of tournaments: the first stays, others turn
        sides = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        pairs.append([(min(a, b), max(a, b)) for a, b in sides if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return pairs


def time_exchanges(
    exchange: Exchange, pattern: Tensor, ranks: tuple[int, int], *, repeats: int
) -> tuple[list[float], bool]:
    """Return the seconds that each exchange of pattern + rank took, and whether all received values were right."""
    rank, partner = ranks
    values, received = pattern + rank, torch.empty_like(pattern)
    token, answer = torch.zeros(1, device=pattern.device), torch.empty(1, device=pattern.device)
    times_s, is_correct = [], True
    for _ in range(repeats):
        received.fill_(-1)
        exchange(token, answer, partner)  # both ranks finish it together
        started = time.perf_counter()
        exchange(values, received, partner)
        times_s.append(time.perf_counter() - started)
        is_correct = is_correct and torch.equal(received.sub_(partner), pattern)
    return times_s, is_correct
