"""Two ranks send each other values at once: what the link between them carries, both ways as in a ring."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput

# A contiguous float32 tensor, room for as many values of the other rank, and that rank; returns when both are there.
Exchange = Callable[[Tensor, Tensor, int], None]

# Of several hosts each is measured with so many others: of 16 with all.
MOST_ROUNDS = 15


def exchange_on(comm: Comm, device: torch.device) -> Exchange:
    """Over NCCL between GPUs, over MPI between CPUs."""
    return over_torch(comm, "nccl") if device.type == "cuda" else over_mpi()


def over_mpi() -> Exchange:
    """MPI_Sendrecv on the tensors' memory."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        raise BadInput("--pairs: horovodrun --gloo starts no MPI, use mpirun, or leave it out")
    from mpi4py import MPI

    def exchange(values: Tensor, received: Tensor, other: int) -> None:
        MPI.COMM_WORLD.Sendrecv(values.numpy(), dest=other, recvbuf=received.numpy(), source=other)

    return exchange


def over_torch(comm: Comm, backend: str) -> Exchange:
    """A send and a receive of torch.distributed, in one group of NCCL's calls."""
    import torch.distributed as dist

    meet(comm, backend)

    def exchange(values: Tensor, received: Tensor, other: int) -> None:
        both = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, received, other)]
        for half in dist.batch_isend_irecv(both):
            half.wait()
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    return exchange


def meet(comm: Comm, backend: str) -> None:
    """Join the ranks in torch.distributed: those of one host in a file, those of several where hvdlaunch has told."""
    import torch.distributed as dist

    if comm.local_size != comm.size:
        if "MASTER_ADDR" not in os.environ:
            raise BadInput("the ranks of several hosts do not know where to meet: start them with hvdlaunch run")
        dist.init_process_group(backend, rank=comm.rank, world_size=comm.size)
        dist.barrier()  # NCCL wants all ranks in its first call
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as own:
        folder = Path(comm.broadcast(own.encode()).decode())
        store = dist.FileStore(str(folder / "store"), comm.size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
        dist.barrier()
        comm.allgather(None)  # before the folder is removed


def rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, by the host of each rank; those of one round are measured at once.

    On one host every two ranks, one pair after the other, since links inside a host share parts. Of several hosts the
    first ranks of every two: in a round each host is in one pair at most, so that no pair takes another's network card.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) == 1:
        return [[(a, b)] for a in range(len(hosts)) for b in range(a + 1, len(hosts))]
    circle: list[int | None] = [*firsts, None] if len(firsts) % 2 else [*firsts]
    found = []
    for _ in range(min(len(circle) - 1, MOST_ROUNDS)):  # the circle method of tournaments: the first stays, others turn
        sides = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in sides if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def time_exchanges(
    exchange: Exchange, pattern: Tensor, ranks: tuple[int, int], *, repeats: int
) -> tuple[list[float], bool]:
    """How long each exchange of pattern + rank took, in seconds, and whether all that came was right."""
    mine, other = ranks
    values, received = pattern + mine, torch.empty_like(pattern)
    mark, answer = torch.zeros(1, device=pattern.device), torch.empty(1, device=pattern.device)
    times_s, right = [], True
    for _ in range(repeats):
        received.fill_(-1)
        exchange(mark, answer, other)  # both leave it together
        started = time.perf_counter()
        exchange(values, received, other)
        times_s.append(time.perf_counter() - started)
        right = right and torch.equal(received.sub_(other), pattern)
    return times_s, right
