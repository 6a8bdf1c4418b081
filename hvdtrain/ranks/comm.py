"""Ranks and what they say to each other: the only file that imports Horovod and mpi4py.

`connect()` joins the ranks over MPI, so that they can agree on settings and data; `comm.start()` then starts
Horovod. One process without a launcher gets SerialComm, which needs neither.
"""

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hvdtrain.safety.exits import RANK_VARIABLES, BadInput

# Fusing buffer of Horovod's all-reduce, in MiB: see "Fusion threshold" in docs/performance.md for the measurement.
FUSION_THRESHOLD_MB = 128.0

# A rank that waits so long for another ends the job; Horovod by itself would wait for ever.
STALL_SHUTDOWN_S = 600

Decision = TypeVar("Decision")


class GradientSync(Protocol):
    """Sums gradients over ranks while backward is still running."""

    def expect(self, backward_passes: int) -> None:
        """Say how many backward passes this rank makes before `finish`; communication starts in the last one."""

    def include(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Sum these parameters' gradients too; their names are new ones."""

    def finish(self) -> None:
        """Wait until every `.grad` holds the sum over ranks."""


class Comm(Protocol):
    """One rank among `size`, `local_rank` among the `local_size` of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    waiting: Callable[[], AbstractContextManager[None]]  # entered while this rank waits for others

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank."""

    def collect(self, content: bytes) -> list[bytes]:
        """On rank 0 the contents of all ranks, by rank; elsewhere an empty list."""

    def start(self, timeline: Path | None = None) -> None:
        """Start Horovod; before this only `gather` may be called.

        Rank 0 writes Horovod's timeline to that file, if `connect` was told of one.
        """

    def broadcast_(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over ranks of a small tensor."""

    def sum_later(self, values: Tensor) -> Callable[[], Tensor]:
        """Begin such a sum of a tensor on the CPU, one at a time; the answer waits for it."""

    def differentiable_sum(self, values: Tensor, name: str) -> Tensor:
        """The same with a backward pass over all ranks; `name` must be the same on all and used once at a time."""

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by their average over ranks, in one all-reduce."""

    def gradient_sync(self, model: nn.Module, *, compression: str, groups: int | None = None) -> GradientSync:
        """A GradientSync for the model's trainable parameters; `compression` is 'none' or 'fp16'.

        With `groups` the gradients are sent in that many fixed groups instead of as they come; then a parameter must
        get a gradient on all ranks or on none.
        """


class _NoSync:
    def expect(self, backward_passes: int) -> None:
        pass

    def include(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        pass

    def finish(self) -> None:
        pass


class SerialComm:
    """One process: every collective is the identity."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, content: bytes) -> list[bytes]:
        return [content]

    def start(self, timeline: Path | None = None) -> None:
        pass

    def broadcast_(self, model: nn.Module) -> None:
        pass

    def sum(self, values: Tensor) -> Tensor:
        return values

    def sum_later(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values

    def differentiable_sum(self, values: Tensor, name: str) -> Tensor:
        return values

    def average_(self, tensors: Iterable[Tensor]) -> None:
        pass

    def gradient_sync(self, model: nn.Module, *, compression: str, groups: int | None = None) -> GradientSync:
        return _NoSync()


class _Wire:
    """How a gradient travels: as a contiguous view of its memory, in a type that Horovod and the sum can bear.

    Horovod refuses channels_last tensors and bfloat16. In fp16 the sum does not overflow where the mean does not,
    since the ranks' losses are divided by the global batch before they are summed.
    """

    def __init__(self, compression: str) -> None:
        self._half = compression == "fp16"

    def compress(self, gradient: Tensor) -> tuple[Tensor, tuple[bool, torch.dtype]]:
        turned = not gradient.is_contiguous()
        view = gradient.permute(0, 2, 3, 1) if turned else gradient
        if self._half:
            view = view.half()
        elif gradient.dtype == torch.bfloat16:
            view = view.float()
        return view, (turned, gradient.dtype)

    def decompress(self, total: Tensor, context: tuple[bool, torch.dtype]) -> Tensor:
        turned, dtype = context
        return (total.permute(0, 3, 1, 2) if turned else total).to(dtype)


class _HorovodSync:
    """hvd.DistributedOptimizer used for its gradient hooks alone.

    The optimizers it wraps have no part in the training: the real one stays as torch made it, with its defaults,
    its constructor's arguments and its zero_grad(set_to_none=True), all of which the wrapper would break.
    """

    def __init__(self, comm: "HorovodComm", model: nn.Module, compression: str, groups: int | None) -> None:
        self._comm = comm
        self._compression = compression
        self._groups = groups
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self.include(model.named_parameters())

    def include(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        import horovod.torch as hvd

        trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        parameters = [parameter for _, parameter in trainable]
        self._parameters += parameters
        # Sum, not Average: the loss is already divided by the global batch, so that ranks may hold unequal shares.
        self._hooks.append(
            hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, lr=0.0),
                named_parameters=trainable,
                compression=_Wire(self._compression),
                op=hvd.Sum,
                groups=self._groups and min(self._groups, len(parameters)),
            )
        )

    def expect(self, backward_passes: int) -> None:
        for hooks in self._hooks:
            hooks.set_backward_passes_per_step(backward_passes)

    def finish(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:  # unused: Horovod's own zeros would have another memory format
                parameter.grad = torch.zeros_like(parameter)
        with self._comm.waiting():
            for hooks in self._hooks:
                hooks.synchronize()


class _SumOverRanks(torch.autograd.Function):
    """hvd.allreduce with names of its own, the same at every step: Horovod's differentiable one makes up new ones."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, name: str, comm: "HorovodComm") -> Tensor:
        import horovod.torch as hvd

        ctx.name, ctx.comm = name, comm
        with comm.waiting():
            total: Tensor = hvd.allreduce(values, op=hvd.Sum, name=f"{name}.forward")
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        import horovod.torch as hvd

        with ctx.comm.waiting():
            return hvd.allreduce(gradient.contiguous(), op=hvd.Sum, name=f"{ctx.name}.backward"), None, None


class HorovodComm:
    """The ranks of one mpirun, or of one horovodrun with its Gloo controller (then `mpi` is None)."""

    def __init__(self, mpi: Any) -> None:
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._mpi = mpi
        if mpi is None:
            self.start()
            import horovod.torch as hvd

            self.rank, self.size = hvd.rank(), hvd.size()
            self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        else:
            from mpi4py import MPI

            host = mpi.Split_type(MPI.COMM_TYPE_SHARED)
            self.rank, self.size = mpi.rank, mpi.size
            self.local_rank, self.local_size = host.rank, host.size

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        with self.waiting():
            texts = self._mpi.allgather(text) if self._mpi is not None else _all_gathered(text)
        return [json.loads(one) for one in texts]

    def collect(self, content: bytes) -> list[bytes]:
        with self.waiting():
            if self._mpi is None:
                everyones = _all_gathered(content)
                return everyones if self.rank == 0 else []
            return self._mpi.gather(content) or []

    def start(self, timeline: Path | None = None) -> None:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            hvd.init()
        if timeline is not None:
            hvd.start_timeline(str(timeline))

    def broadcast_(self, model: nn.Module) -> None:
        import horovod.torch as hvd

        # Not broadcast_optimizer_state: on a fresh optimizer it takes a real step on some ranks. Fresh state is
        # equal anyway.
        with self.waiting():
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def sum(self, values: Tensor) -> Tensor:
        import horovod.torch as hvd

        with self.waiting():
            total: Tensor = hvd.allreduce(values, op=hvd.Sum, name="sum")
        return total

    def sum_later(self, values: Tensor) -> Callable[[], Tensor]:
        import horovod.torch as hvd

        begun = hvd.allreduce_async(values, op=hvd.Sum, name="sum_later")

        def finish() -> Tensor:
            with self.waiting():
                total: Tensor = hvd.synchronize(begun)
            return total

        return finish

    def differentiable_sum(self, values: Tensor, name: str) -> Tensor:
        total: Tensor = _SumOverRanks.apply(values, name, self)  # type: ignore[no-untyped-call]
        return total

    def average_(self, tensors: Iterable[Tensor]) -> None:
        import horovod.torch as hvd

        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floats:
            return
        flat = torch.cat([tensor.flatten().float() for tensor in floats])
        with self.waiting():
            flat = hvd.allreduce_(flat, op=hvd.Average, name="average")
        for tensor, part in zip(floats, flat.split([tensor.numel() for tensor in floats]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def gradient_sync(self, model: nn.Module, *, compression: str, groups: int | None = None) -> GradientSync:
        return _HorovodSync(self, model, compression, groups)


def _all_gathered(content: bytes) -> list[bytes]:
    """The contents of all ranks by Horovod, where there is no MPI."""
    import horovod.torch as hvd

    lengths = hvd.allgather(torch.tensor([len(content)]), name="gather.lengths").tolist()
    joined = hvd.allgather(torch.frombuffer(bytearray(content), dtype=torch.uint8), name="gather.content")
    return [part.numpy().tobytes() for part in joined.split(lengths)]


def connect(*, fusion_threshold_mb: float | None, cycle_time_ms: float | None, timeline: bool = False) -> Comm:
    """Join the ranks that were launched together, or be alone.

    Horovod's settings (MiB and ms; None leaves the environment's, and for the threshold else FUSION_THRESHOLD_MB)
    are put where Horovod will read them (threshold 0: each gradient is summed by itself, in the same order in every
    run); ranks that fill their cores are made to yield while they wait, and a rank
    that does not come to a sum ends the job after STALL_SHUTDOWN_S, unless the environment says otherwise. `timeline`
    says that `start` will be given a file for one; raises BadInput where there is no Horovod to write it.
    """
    if fusion_threshold_mb is not None:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(round(fusion_threshold_mb * 2**20))
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(round(FUSION_THRESHOLD_MB * 2**20)))
    if cycle_time_ms is not None:
        os.environ["HOROVOD_CYCLE_TIME"] = str(cycle_time_ms)
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_SHUTDOWN_S))
    if timeline:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # the file's name comes with `start`

    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        comm: Comm = HorovodComm(mpi=None)
    elif any(name in os.environ for name in RANK_VARIABLES):
        local_size = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        if local_size >= cores_together(local_size):
            # Open MPI spins as if each rank had a core to spare. It reads this at MPI_Init, which the import runs.
            os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if os.environ.get("OMPI_COMM_WORLD_SIZE") == str(local_size):
            os.environ["OMPI_MCA_btl"] = _without_tcp(os.environ.get("OMPI_MCA_btl", ""))
        from mpi4py import MPI

        comm = HorovodComm(MPI.COMM_WORLD)
    elif timeline:
        raise BadInput("--timeline: only Horovod has one, so start with horovodrun or mpirun, or leave it out")
    else:
        return SerialComm()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores_together(comm.local_size) // comm.local_size))
    return comm


def _without_tcp(transports: str) -> str:
    """Open MPI's transports for the ranks of one host: its TCP would listen on every address. A list of them stays."""
    if not transports:
        return "^tcp"
    return f"{transports},tcp" if transports.startswith("^") else transports


def cores_together(local_size: int) -> int:
    """How many cores the `local_size` ranks of this host may use between them.

    A rank sees its own cores and its parent's, the launcher's, which is not bound: ranks that were bound one by one
    have together as many as they are, ranks that were not share what the launcher may use.
    """
    own = os.sched_getaffinity(0)
    launcher = os.sched_getaffinity(os.getppid())
    return min(len(own) * local_size, len(own | launcher))


def agreed(comm: Comm, decide: Callable[[], Decision]) -> Decision:
    """The result of `decide`; if it raises BadInput on any rank, BadInput with the first one's message on all."""
    decision: list[Decision] = []
    error = None
    try:
        decision.append(decide())
    except BadInput as bad:
        error = str(bad)
    errors = comm.gather([socket.gethostname(), error])
    failed = [(rank, host, text) for rank, (host, text) in enumerate(errors) if text is not None]
    if failed:
        rank, host, text = failed[0]
        everywhere = len(failed) == comm.size and len({text for _, _, text in failed}) == 1
        raise BadInput(text if everywhere else f"rank {rank} on {host}: {text}")
    return decision[0]


def require_equal(comm: Comm, facts: Mapping[str, Any]) -> None:
    """Raise BadInput on all ranks, naming both values, where a rank's facts (JSON values) differ from rank 0's."""
    everyones = comm.gather([socket.gethostname(), dict(facts)])
    first_host, first = everyones[0]
    for rank, (host, theirs) in enumerate(everyones):
        for name in first.keys() | theirs.keys():
            if first.get(name) != theirs.get(name):
                raise BadInput(
                    f"ranks disagree on {name}: rank 0 on {first_host} has {first.get(name)!r}, rank {rank} on {host} "
                    f"has {theirs.get(name)!r}; start all ranks with the same command and the same code"
                )


def require_own_device(comm: Comm, device: torch.device) -> None:
    """Raise BadInput on all ranks where two ranks share one GPU, compared by host and UUID."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, theirs) in enumerate(comm.gather([socket.gethostname(), uuid])):
        if theirs is None:
            continue
        if (host, theirs) in owners:
            raise BadInput(
                f"ranks {owners[host, theirs]} and {rank} on {host} were both given GPU {theirs}: "
                "give each rank its own, or start one rank per GPU"
            )
        owners[host, theirs] = rank


def choose_device(comm: Comm) -> torch.device:
    """This rank's GPU: index 0 when one is visible, else the local rank's; the CPU where there is no GPU.

    Raises BadInput where the host has fewer visible GPUs than ranks.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return torch.device("cpu")
    if visible > 1 and comm.local_rank >= visible:
        raise BadInput(
            f"{socket.gethostname()} has {comm.local_size} ranks but {visible} visible GPUs: "
            f"start at most {visible} ranks there"
        )
    device = torch.device("cuda", 0 if visible == 1 else comm.local_rank)
    torch.cuda.set_device(device)
    return device
