"""A GPU that is not there: all operators of the process pass through it, and the host computes the numbers."""

import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simgpu.simulator.findings import MIXED, RACE, WAIT, Finding
from tests.simgpu.simulator.memory import Memory
from tests.simgpu.simulator.operators import (
    BY_INDICES,
    COPIES,
    ON_HOST,
    READ_BY_HOST,
    WITHOUT_KERNEL,
    Operator,
    aten,
    operator_of,
    tensors_in,
)
from tests.simgpu.simulator.streams import Event, Stream
from tests.simgpu.simulator.tensor import SimTensor

_HOST = torch.device("cpu")
_NO_NAMES: defaultdict[int, list[str]] = defaultdict(list)  # of arguments, for the race detector


class Gpu(TorchDispatchMode):
    """It notes what is wrong, and what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EventHandler()  # torch's race detector: what happens before what
        self.findings: list[Finding] = []
        self.waits: list[Finding] = []
        self.memory = Memory(self.order, self.find)
        self.event_numbers = itertools.count(1)
        self._stream_numbers = itertools.count()
        self.streams = [self.new_stream()]  # the default one, and those that have become current in turn

    @property
    def stream(self) -> Stream:
        """The current one."""
        return self.streams[-1]

    def new_stream(self, *_: Any, **__: Any) -> Stream:
        """torch.cuda.Stream(device)."""
        return Stream(self, next(self._stream_numbers))

    def new_event(self, *_: Any, **__: Any) -> Event:
        """torch.cuda.Event(...)."""
        return Event(self)

    def find(self, kind: str, detail: str) -> None:
        """Something is wrong here."""
        self.findings.append(Finding(kind, detail))

    def note_wait(self, reason: str) -> None:
        """The host waits for the device here."""
        self.waits.append(Finding(WAIT, reason))

    def wait_for(self, stream: Stream, reason: str) -> None:
        """The host waits here until the stream has nothing left to do."""
        self.note_wait(reason)
        self.order._handle_stream_synchronization(stream.cuda_stream)

    def wait_for_all(self) -> None:
        """torch.cuda.synchronize()."""
        self.note_wait("torch.cuda.synchronize")
        self.order._handle_device_synchronization()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_gpu, of_host = [], []
        for tensor in tensors_in((*args, *kwargs.values())):
            (of_gpu if type(tensor) is SimTensor else of_host).append(tensor)
        operator, device = operator_of(func), kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if func in COPIES and (to_gpu or of_gpu) and (copied := self._copy(func, args, kwargs, of_gpu)) is not None:
            return copied
        if not to_gpu and (not of_gpu or (device is not None and func in WITHOUT_KERNEL)):
            return self._run_on_host(func, args, kwargs, operator)
        self._require_one_device(func, operator, of_gpu, of_host)
        self._wait_as(func, args)
        return self._run(func, args, kwargs, operator, of_gpu)

    def _run_on_host(self, func: Any, args: Any, kwargs: Any, operator: Operator) -> Any:
        if func is aten.is_pinned.default:
            return self.memory.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self.memory.pin(args[0].clone())
        if self.memory.is_copying and func not in WITHOUT_KERNEL:
            written = [id(one) for one in tensors_in(operator.written(args, kwargs))]
            for tensor in tensors_in((*args, *kwargs.values())):
                self.memory.touch(tensor, is_written=id(tensor) in written)
        if kwargs.get("pin_memory"):
            return self.memory.pin(func(*map(_inner, args), **{**kwargs, "pin_memory": False}))
        return func(*map(_inner, args), **kwargs)

    def _require_one_device(self, func: Any, operator: Operator, of_gpu: list[Any], of_host: list[Any]) -> None:
        if not of_gpu or not of_host or func in BY_INDICES:
            return
        bad = [tuple(one.shape) for one in of_host if one.dim() > 0 or not operator.takes_host_scalars]
        if bad:
            self.find(MIXED, f"{func}: {bad} on the CPU")
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {func}")

    def _wait_as(self, func: Any, args: Any) -> None:
        """Let the host wait if this operator makes it wait."""
        if func in READ_BY_HOST:
            self.wait_for(self.stream, str(func))
        if func in BY_INDICES:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.wait_for(self.stream, f"{func} by a mask")
                elif index is not None and not isinstance(index, SimTensor):
                    self.wait_for(self.stream, f"{func} by indices on the CPU")

    def _copy(self, func: Any, args: Any, kwargs: Any, of_gpu: list[Any]) -> Any:
        """A copy from or to the device; None if it stays on one of them."""
        is_new = func is aten._to_copy.default
        source, target = (args[0], None) if is_new else (args[1], args[0])
        is_down = isinstance(source, SimTensor)
        if is_new and is_down == (torch.device(kwargs.get("device") or source.device).type == "cuda"):
            return None
        if not is_new and len(of_gpu) != 1:
            return None
        non_blocking = bool(kwargs.get("non_blocking", not is_new and len(args) > 2 and args[2]))
        if is_new:
            options = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
            made = func(_inner(source), **options)
            target = made if is_down else SimTensor(made, self)
            if is_down and non_blocking:
                self.memory.pin(made)
        else:
            _inner(target).copy_(_inner(source))
        self._note_copy(source, target, is_down=is_down, non_blocking=non_blocking)
        return target

    def _note_copy(self, source: Any, target: Any, *, is_down: bool, non_blocking: bool) -> None:
        host, of_gpu = (target, source) if is_down else (source, target)
        way = f"copy of {source.nbytes} bytes from {'device to host' if is_down else 'host to device'}"
        self.memory.touch(host, is_written=is_down)
        self._launch(way, [of_gpu] if is_down else [], [] if is_down else [of_gpu])
        if not non_blocking:
            self.wait_for(self.stream, f"blocking {way}")
        elif self.memory.is_pinned(host):
            self.memory.begin_copy(host, self.stream, is_written=is_down)
        else:
            self.wait_for(self.stream, f"{way}, of memory that is not pinned, non_blocking in vain")

    def _run(self, func: Any, args: Any, kwargs: Any, operator: Operator, of_gpu: list[Any]) -> Any:
        if func is aten.set_.source_Tensor:
            return self._set(*args)
        compute = ON_HOST.get(func, func)
        out = compute(*map(_inner, args), **{name: _inner(value) for name, value in kwargs.items()})
        written = operator.written(args, kwargs)
        if operator.returns_written is None:
            result = self._wrap(out)
        elif operator.returns_written == 1:
            result = written[0]
        else:
            result = tuple(written[: operator.returns_written]) or None
        if not operator.is_view and func not in WITHOUT_KERNEL:
            new = [] if operator.returns_written is not None else list(tensors_in([result]))
            self._launch(str(func), of_gpu, [*tensors_in(written), *new])
        return result

    def _set(self, target: SimTensor, source: SimTensor) -> SimTensor:
        """`target` has the memory of `source` from now on; the wrapper cannot have another shape or layout."""
        if (target.shape, target.stride()) != (source.shape, source.stride()):
            raise NotImplementedError("set_ to a tensor of another shape or other strides")
        target.hold(source.inner)
        return target

    def _wrap(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return SimTensor(out, self)
        if isinstance(out, list | tuple):
            return type(out)(self._wrap(one) for one in out)
        return out

    def _launch(self, kernel: str, read: list[Any], written: list[Any]) -> None:
        """The current stream is given a kernel."""
        writes = {one.storage for one in written}
        reads = {one.storage for one in read} - writes
        for error in self.order._handle_kernel_launch(self.stream.cuda_stream, reads, writes, set(), kernel, _NO_NAMES):
            now, before = error.current_access, error.previous_access
            detail = f"{kernel} on stream {now.stream} does not wait for {before.operator} on stream {before.stream}"
            self.find(RACE, detail)


def _inner(value: Any) -> Any:
    """An argument as the host computes with it."""
    if isinstance(value, SimTensor):
        return value.inner
    if isinstance(value, list | tuple):
        return [_inner(one) for one in value]
    if isinstance(value, torch.device) and value.type == "cuda":
        return _HOST
    return value
