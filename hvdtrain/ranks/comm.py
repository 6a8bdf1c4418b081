"""Ranks and what they say to each other: HorovodComm, or for one process SerialComm.

Torch is imported where tensors are: ranks meet, and may refuse their settings, without it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.ranks.sync import GradientSync, WaitContext

# MiB of a bucket; "Which reducer and bucket size?" in docs/explanation/benchmarks.md compares sizes. With DDP's 25 all
# gradients of efficientnet_b0 are one bucket, sent when the backward pass has ended.
BUCKET_MB = 8.0

# Of a broadcast, at a time: MPI counts to 2 GiB.
_CHUNK_BYTES = 2**28

# Between looks at a sum. Horovod's own wait asks all the time, on a core that its thread may need: see "Waiting" in
# docs/explanation/communication.md.
LOOK_EVERY_S = 200e-6

# A sum that comes sooner is no wait: each one that the watchdog is told of starts a thread, its timer.
SHORT_WAIT_S = 0.005


Reducer = Literal["bucket", "horovod"]


class Members(Protocol):
    """Ranks that act together: all of them call each method, in the same order.

    Here and in the protocols below a method has the answer of a process that is alone.
    """

    rank: int = 0  # of this process among them
    size: int = 1
    wait_context: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while this rank waits for others

    def allgather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank."""
        return [value]

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        """The element-wise sum over ranks of a small tensor.

        `name` must be the same on all ranks and used once at a time; a sum that recurs at every step in a shape of its
        own has a name of its own, since Horovod remembers one shape for each.
        """
        return values

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Begin to replace a tensor by its sum over ranks; the returned function waits for it. Of `name` as above."""
        return lambda: values


class Group(Members, Protocol):
    """Ranks that hold the same parameters."""

    def start(self, timeline: Path | None = None) -> None:
        """Start Horovod; before this only `allgather`, `gather` and `broadcast` may be called.

        Rank 0 writes Horovod's timeline to that file, if `connect` was told of one.
        """
        return

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by their average over ranks, in one all-reduce."""
        return

    def broadcast_(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        return

    def gradient_sync(
        self,
        model: nn.Module,
        *,
        compression: str,
        loss_is_scaled: bool = False,
        scale_for: int | None = None,
        reducer: Reducer = "bucket",
        groups: int | None = None,
        bucket_mb: float | None = None,
    ) -> GradientSync:
        """A GradientSync for the trainable parameters of a model on its device; `compression` is 'none' or 'fp16'.

        Where the loss is scaled, fp16 gradients are not scaled once more; else they are scaled for `scale_for` ranks,
        these if not given. `groups` is for Horovod's reducer, which sends the gradients in that many fixed groups
        instead of as they come. `bucket_mb` (MiB, BUCKET_MB if None, 0 for each gradient alone) is for buckets.
        """
        from hvdtrain.ranks.sync import GradientSync

        return GradientSync()


class Comm(Members, Protocol):
    """The world: all ranks of the run, which agree, report and save together."""

    local_rank: int = 0  # among the `local_size` ranks of this host
    local_size: int = 1

    @property
    def data(self) -> Group:
        """The ranks with a replica of the same parameters and data of their own: gradients, shards, batch norm."""

    @property
    def sync_group(self) -> Members:
        """The ranks of the replicas that sum their gradients at every step: a block of consecutive ones, or all."""

    @property
    def replica(self) -> Members:
        """The ranks that hold the parts of one replica: this one alone, as long as each holds all of it."""

    def start(self, timeline: Path | None = None) -> None:
        """Start Horovod between those that it connects, see Group."""
        return

    def gather(self, content: bytes) -> list[bytes]:
        """On rank 0 the contents of all ranks, by rank; elsewhere an empty list."""
        return [content]

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's content, of any length; what the others give is not looked at."""
        return content


class SerialComm(Comm, Group):
    """One process: every collective is the identity. Subclasses have more ranks, with a whole replica each."""

    @property
    def data(self) -> Group:
        return self

    @property
    def sync_group(self) -> Members:
        return self

    @property
    def replica(self) -> Members:
        return SerialComm()


class HorovodComm(SerialComm):
    """The ranks of one mpirun, or of one horovodrun with its Gloo controller (then `mpi` is None)."""

    def __init__(self, mpi: Any, *, is_world: bool = True) -> None:
        """`mpi` is MPI's world, or a part of it that has Horovod for itself."""
        self._init_arguments = () if is_world else (mpi,)
        self._mpi = mpi
        if mpi is None:
            self.start()
            import horovod.torch as hvd

            self.rank, self.size = hvd.rank(), hvd.size()
            self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        else:
            self._set_communicator(mpi)

    def _set_communicator(self, mpi: Any) -> None:
        """Be the ranks of this communicator."""
        from mpi4py import MPI

        host = mpi.Split_type(MPI.COMM_TYPE_SHARED)
        self._mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.local_rank, self.local_size = host.rank, host.size
        host.Free()

    @property
    def mpi_comm(self) -> Any:
        """MPI's communicator of these ranks; None where there is no MPI."""
        return self._mpi

    def _wait(self) -> AbstractContextManager[None]:
        return self.wait_context()  # as it is then: the watchdog comes after the ranks have met

    def allgather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        with self.wait_context():
            texts = self._mpi.allgather(text) if self._mpi is not None else _allgather_by_horovod(text)
        return [json.loads(answer) for answer in texts]

    def gather(self, content: bytes) -> list[bytes]:
        with self.wait_context():
            if self._mpi is None:
                contents = _allgather_by_horovod(content)
                return contents if self.rank == 0 else []
            return self._mpi.gather(content) or []

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        length = self.allgather(len(content))[root]
        buffer = content if self._is_root(root) else bytearray(length)
        with self.wait_context():
            for start in range(0, length, _CHUNK_BYTES):
                chunk = memoryview(buffer)[start : start + _CHUNK_BYTES]
                if self._mpi is not None:
                    self._mpi.Bcast(chunk, root)
                else:
                    _broadcast_by_horovod(chunk)
        return bytes(buffer)

    def _is_root(self, root: int) -> bool:
        own_rank: int = self.rank if self._mpi is None else self._mpi.rank
        return root == own_rank

    def start(self, timeline: Path | None = None) -> None:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            hvd.init(*self._init_arguments)
        if timeline is not None:
            hvd.start_timeline(str(timeline))

    def stop(self) -> None:
        """End Horovod, which `start` may start again; its binding lets go of the tensors of sums that failed."""
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        hvd.shutdown()
        mpi_ops._handle_map.clear()

    def allreduce(self, values: Tensor, name: str = "sum") -> Tensor:
        import horovod.torch as hvd

        with self.wait_context():
            total: Tensor = hvd.allreduce(values, op=hvd.Sum, name=name)
        return total

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        import horovod.torch as hvd

        return partial(self._finish_sum, hvd.allreduce_async_(values, op=hvd.Sum, name=name))

    def _finish_sum(self, handle: int) -> Tensor:
        """Wait for a sum by Horovod's handle."""
        import horovod.torch as hvd

        wait_until(lambda: hvd.poll(handle), self._wait)
        total: Tensor = hvd.synchronize(handle)
        return total

    def average_(self, tensors: Iterable[Tensor]) -> None:
        import horovod.torch as hvd
        import torch

        float_tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not float_tensors:
            return
        flat = torch.cat([tensor.flatten().float() for tensor in float_tensors])
        with self.wait_context():
            flat = hvd.allreduce_(flat, op=hvd.Average, name="average")
        for tensor, part in zip(float_tensors, flat.split([tensor.numel() for tensor in float_tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def broadcast_(self, model: nn.Module) -> None:
        import horovod.torch as hvd

        # Not broadcast_optimizer_state: on a fresh optimizer it takes a real step on some ranks. Fresh state is
        # equal anyway.
        with self.wait_context():
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def gradient_sync(
        self,
        model: nn.Module,
        *,
        compression: str,
        loss_is_scaled: bool = False,
        scale_for: int | None = None,
        reducer: Reducer = "bucket",
        groups: int | None = None,
        bucket_mb: float | None = None,
    ) -> GradientSync:
        from hvdtrain.ranks.buckets import BucketSync
        from hvdtrain.ranks.sync import GradientSync
        from hvdtrain.ranks.wire import Wire

        if self.size == 1:
            return GradientSync()
        wire = Wire(compression, scale_for or self.size, loss_is_scaled=loss_is_scaled)
        if reducer == "horovod":
            from hvdtrain.ranks.distributed_optimizer import HorovodSync

            # Not on two hosts: between network namespaces looking at sums took longer than Horovod's own wait.
            shares_cores = self.local_size == self.size and next(model.parameters()).device.type == "cpu"
            return HorovodSync(model, wire=wire, groups=groups, wait_context=self._wait, shares_cores=shares_cores)
        return BucketSync(
            model,
            wire=wire,
            bucket_mb=BUCKET_MB if bucket_mb is None else bucket_mb,
            broadcast_names=lambda names: list(json.loads(self.broadcast(json.dumps(names).encode()))),
            begin_sum=self.begin_sum,
        )


def loss_errors() -> tuple[type[Exception], ...]:
    """What collectives raise where a rank is lost."""
    from horovod.common.exceptions import HorovodInternalError
    from mpi4py import MPI

    return HorovodInternalError, MPI.Exception


def wait_until(is_done: Callable[[], bool], wait_context: WaitContext) -> None:
    """Return when it is done, without taking the core that it may need; a longer wait is inside `wait_context`."""
    with ExitStack() as waits:
        report_at_s = time.monotonic() + SHORT_WAIT_S
        while not is_done():
            if time.monotonic() > report_at_s:
                waits.enter_context(wait_context())
                report_at_s = math.inf
            time.sleep(LOOK_EVERY_S)


def _allgather_by_horovod(content: bytes) -> list[bytes]:
    """The contents of all ranks by Horovod, where there is no MPI."""
    import horovod.torch as hvd
    import torch

    lengths = hvd.allgather(torch.tensor([len(content)]), name="gather.lengths").tolist()
    contents = hvd.allgather(torch.frombuffer(bytearray(content), dtype=torch.uint8), name="gather.content")
    return [part.numpy().tobytes() for part in contents.split(lengths)]


def _broadcast_by_horovod(chunk: memoryview) -> None:
    """Put rank 0's bytes into the memory of the other ranks, where there is no MPI."""
    import horovod.torch as hvd
    import torch

    values = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
    hvd.broadcast_(values, root_rank=0, name="broadcast.content")
    if not chunk.readonly:  # rank 0's is
        chunk[:] = values.numpy().data
