"""Communicators: HorovodComm for several ranks, SerialComm for a single process.

torch is imported only where tensors are used: ranks can connect and reject their settings without it.
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

# MiB per bucket; "Which reducer and bucket size?" in docs/explanation/benchmarks.md compares sizes. With DDP's 25 MiB
# all gradients of efficientnet_b0 form a single bucket, which is sent only after backward.
BUCKET_MB = 8.0

# Size of a chunk of a broadcast: MPI's counts end at 2 GiB.
_CHUNK_BYTES = 2**28

# Time between polls of a sum. Horovod's own wait polls continuously, on a core that its thread may need: see "Waiting"
# in docs/explanation/communication.md.
LOOK_EVERY_S = 200e-6

# Shorter waits are not reported to the watchdog: each report starts a timer thread.
SHORT_WAIT_S = 0.005


Reducer = Literal["bucket", "horovod"]


class Members(Protocol):
    """Ranks that act together: all of them call each method, in the same order.

    In this and the following protocols, each method's default is the result for a single process.
    """

    rank: int = 0  # of this process in the group
    size: int = 1
    wait_context: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while this rank waits for others

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


class Group(Members, Protocol):
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
        """Return a GradientSync for the model's trainable parameters; `compression` is 'none' or 'fp16'.

        If the loss is scaled, fp16 gradients are not scaled again; otherwise they are scaled for `scale_for` ranks
        (default: the size of this group). `groups` applies to Horovod's reducer, which then sends the gradients in that
        many fixed groups instead of in order of arrival. `bucket_mb` (MiB, BUCKET_MB if None, 0 for each gradient
        alone) applies to buckets. The model is on its device.
        """
        from hvdtrain.ranks.sync import GradientSync

        return GradientSync()


class Comm(Members, Protocol):
    """All ranks of the run, which agree, report and save together."""

    local_rank: int = 0  # among the `local_size` ranks of this host
    local_size: int = 1

    @property
    def data(self) -> Group:
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


class SerialComm(Comm, Group):
    """A single process: every collective is the identity. Subclasses have several ranks with a whole replica each."""

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
    """The ranks of one mpirun, or of one horovodrun with its Gloo controller (`mpi` is None then)."""

    def __init__(self, mpi: Any, *, is_world: bool = True) -> None:
        """Connect to `mpi`, MPI's world or a part of it that has its own Horovod."""
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
        """Switch to the ranks of this communicator."""
        from mpi4py import MPI

        host = mpi.Split_type(MPI.COMM_TYPE_SHARED)
        self._mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.local_rank, self.local_size = host.rank, host.size
        host.Free()

    @property
    def mpi_comm(self) -> Any:
        """MPI's communicator of these ranks; None without MPI."""
        return self._mpi

    def _wait(self) -> AbstractContextManager[None]:
        return self.wait_context()  # looked up late: the watchdog is created after the ranks have connected

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
        """Shut Horovod down; `start` may start it again. Its binding releases the tensors of failed sums."""
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
        """Wait for a sum, identified by Horovod's handle."""
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

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        import horovod.torch as hvd

        from hvdtrain.ranks.wire import bits

        # broadcast_optimizer_state would take a real step with a fresh optimizer on some ranks. Fresh state is equal on
        # all ranks.
        pairs = [(values, values.contiguous()) for values in map(bits, tensors)]
        with self.wait_context():
            hvd.broadcast_parameters({str(number): sent for number, (_, sent) in enumerate(pairs)}, root_rank=0)
        for values, sent in pairs:
            if sent is not values:
                values.copy_(sent)

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

            # Only on a single host: between network namespaces polling was slower than Horovod's own wait.
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
    """Return the exceptions that collectives raise when a rank is lost."""
    from horovod.common.exceptions import HorovodInternalError
    from mpi4py import MPI

    return HorovodInternalError, MPI.Exception


def wait_until(is_done: Callable[[], bool], wait_context: WaitContext) -> None:
    """Poll until `is_done`, leaving the core free in between; enter `wait_context` if the wait is long."""
    with ExitStack() as waits:
        report_at_s = time.monotonic() + SHORT_WAIT_S
        while not is_done():
            if time.monotonic() > report_at_s:
                waits.enter_context(wait_context())
                report_at_s = math.inf
            time.sleep(LOOK_EVERY_S)


def _allgather_by_horovod(content: bytes) -> list[bytes]:
    """Return the contents of all ranks, through Horovod because there is no MPI."""
    import horovod.torch as hvd
    import torch

    lengths = hvd.allgather(torch.tensor([len(content)]), name="gather.lengths").tolist()
    contents = hvd.allgather(torch.frombuffer(bytearray(content), dtype=torch.uint8), name="gather.content")
    return [part.numpy().tobytes() for part in contents.split(lengths)]


def _broadcast_by_horovod(chunk: memoryview) -> None:
    """Copy rank 0's bytes into the memory of the other ranks, through Horovod because there is no MPI."""
    import horovod.torch as hvd
    import torch

    values = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
    hvd.broadcast_(values, root_rank=0, name="broadcast.content")
    if not chunk.readonly:  # rank 0's is read-only
        chunk[:] = values.numpy().data
