"""Communicators: HorovodComm for several ranks, SerialComm for a single process.

torch is imported only where tensors are used: ranks can connect and reject their settings without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.ranks.waits import WaitContext, wait_until
from hvdtrain.settings.safety import calls

if TYPE_CHECKING:
    from torch import Tensor

# MiB per bucket; "Which reducer and bucket size?" in docs/explanation/benchmarks.md compares sizes. With DDP's 25 MiB
# all gradients of efficientnet_b0 form a single bucket, which is sent only after backward.
BUCKET_MB = 8.0

# Size of a chunk of a broadcast: MPI's counts end at 2 GiB.
_CHUNK_BYTES = 2**28


class Members(Protocol):
    """Ranks that act together: all of them call each method, in the same order.

    In this and the following protocols, each method's default is the result for a single process.
    """

    rank: int = 0  # of this process in the group
    size: int = 1
    wait_context: WaitContext = nullcontext
    calls: calls.Calls = calls.NOWHERE

    def allgather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank."""
        return [value]

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        """Return the element-wise sum of a small tensor over ranks.

        `name` must be the same on all ranks and not be in use by another sum. A sum that recurs at every step with a
        different shape needs a different name, since Horovod caches one shape per name.
        """
        return values

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to replace a tensor by its sum over ranks; the returned function waits for it.

        The rules for `name` are those of `allreduce`.
        """
        return lambda: values


class ReplicaGroup(Members, Protocol):
    """Ranks that hold the same parameters."""

    def start(self, timeline: Path | None = None) -> None:
        """Start Horovod; until then only `allgather`, `gather` and `broadcast` may be called.

        Rank 0 writes Horovod's timeline to the given file, if `connect` was called with `timeline`.
        """
        return

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by their average over ranks, in one all-reduce."""
        return

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into the dense tensors of every rank, of any type."""
        return


class Comm(Members, Protocol):
    """All ranks of the run, which agree, report and save together."""

    local_rank: int = 0  # among the `local_size` ranks of this host
    local_size: int = 1

    @property
    def data(self) -> ReplicaGroup:
        """The ranks of data parallelism, with different samples and equal parameters: gradients, shards, batch norm."""

    @property
    def sync_group(self) -> Members:
        """The ranks of the replicas that sum their gradients at every step: a block of consecutive ranks, or all."""

    @property
    def replica(self) -> Members:
        """The ranks that hold the parts of one replica: only this rank if it holds the whole replica."""

    def start(self, timeline: Path | None = None) -> None:
        """Start Horovod between the ranks that it connects, see Group."""
        return

    def gather(self, content: bytes) -> list[bytes]:
        """Return the contents of all ranks, by rank, on rank 0; other ranks get an empty list."""
        return [content]

    def broadcast(self, content: bytes) -> bytes:
        """Return rank 0's content, of any length; the argument of other ranks is ignored."""
        return content


class SerialComm(Comm, ReplicaGroup):
    """A single process: every collective is the identity. Subclasses have several ranks with a whole replica each."""

    @property
    def data(self) -> ReplicaGroup:
        return self

    @property
    def sync_group(self) -> Members:
        return self

    @property
    def replica(self) -> Members:
        return SerialComm()


class HorovodComm(SerialComm):
    """The ranks of one mpirun, or of one horovodrun with its Gloo controller (`mpi` is None then)."""

    def __init__(self, mpi: Any, *, is_world: bool = True, group: str = calls.WORLD) -> None:
        """Connect to `mpi`, MPI's world or a part of it, the `group`, that has its own Horovod."""
        self._init_arguments = () if is_world else (mpi,)
        self.calls = calls.of_group(group)
        self.mpi = mpi
        if mpi is None:
            self.start()
            self.rank, self.size = self._hvd.rank(), self._hvd.size()
            self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()
        else:
            from mpi4py import MPI

            host = mpi.Split_type(MPI.COMM_TYPE_SHARED)
            self.rank, self.size = mpi.rank, mpi.size
            self.local_rank, self.local_size = host.rank, host.size
            host.Free()

    @property
    def _hvd(self) -> Any:
        import horovod.torch as hvd  # which imports torch

        return hvd

    def allgather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        with self.calls.record("allgather", size=len(text)), self.wait_context():
            texts = self._hvd.allgather_object(text) if self.mpi is None else self.mpi.allgather(text)
        return [json.loads(answer) for answer in texts]

    def gather(self, content: bytes) -> list[bytes]:
        with self.calls.record("gather", size=len(content)), self.wait_context():
            if self.mpi is None:
                contents = self._hvd.allgather_object(content)
                return contents if self.rank == 0 else []
            step = _CHUNK_BYTES // self.size  # MPI counts all bytes of a gather by 32 bits
            starts = range(0, max(1, *self.allgather(len(content))), step)
            gathered = [self.mpi.gather(content[start : start + step]) or [] for start in starts]
            return [b"".join(parts) for parts in zip(*gathered, strict=True)]

    def broadcast(self, content: bytes) -> bytes:
        with self.calls.record("broadcast", size=len(content)), self.wait_context():
            length = self.allgather(len(content))[0]
            send = self._hvd.broadcast_object if self.mpi is None else self.mpi.bcast  # of rank 0
            starts = range(0, length, _CHUNK_BYTES)
            return b"".join([send(content[start : start + _CHUNK_BYTES], 0) for start in starts])

    def start(self, timeline: Path | None = None) -> None:
        if not self._hvd.is_initialized():
            self._hvd.init(*self._init_arguments)
        if timeline is not None:
            self._hvd.start_timeline(str(timeline))

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        with self.calls.record("all-reduce", name, size=values.nbytes), self.wait_context():
            total: Tensor = self._hvd.allreduce(values, op=self._hvd.Sum, name=name)
        return total

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        handle = self._hvd.allreduce_async_(values, op=self._hvd.Sum, name=name)
        return self._wait_for(handle, "all-reduce", name, values.nbytes)

    def begin_scattered_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to sum a flat tensor over ranks; the returned function waits for this rank's equal part of the sum."""
        handle = self._hvd.reducescatter_async(values, op=self._hvd.Sum, name=name)
        return self._wait_for(handle, "reduce-scatter", name, values.nbytes)

    def begin_gather(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to concatenate flat tensors of integers of all ranks; the returned function waits for the result."""
        return self._wait_for(self._hvd.allgather_async(values, name=name), "allgather", name, values.nbytes)

    def _wait_for(self, handle: Any, kind: str, name: str, size: int) -> Callable[[], Tensor]:
        def finish() -> Tensor:
            with self.calls.record(kind, name, size=size):
                wait_until(lambda: self._hvd.poll(handle), self.wait_context)
                result: Tensor = self._hvd.synchronize(handle)
            return result

        return finish

    def average_(self, tensors: Iterable[Tensor]) -> None:
        from hvdtrain.ranks.wire import at_least_float, change_together

        if floats := [tensor for tensor in tensors if tensor.is_floating_point()]:
            hvd = self._hvd
            with self.calls.record("average"), self.wait_context():
                change_together(
                    floats, lambda flat: hvd.allreduce_(at_least_float(flat), op=hvd.Average, name="average")
                )

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        from hvdtrain.ranks.wire import bits

        # broadcast_optimizer_state would take a real step with a fresh optimizer on some ranks. Fresh state is equal on
        # all ranks.
        pairs = [(values, values.contiguous()) for values in map(bits, tensors)]
        with self.calls.record("broadcast"), self.wait_context():
            self._hvd.broadcast_parameters({str(number): sent for number, (_, sent) in enumerate(pairs)}, root_rank=0)
        for values, sent in pairs:
            if sent is not values:
                values.copy_(sent)
