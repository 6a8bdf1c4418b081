"""The device's memory, and the host's pinned memory: who uses it on which stream, and until when."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler

from tests.simgpu.simulator.findings import GIVEN_BACK, PINNED, Finding, Stack
from tests.simgpu.simulator.streams import Stream

GRANULE_BYTES = 512  # of torch's caching allocator
_MOST_COPIES = 256  # that are remembered before those that the host has waited for are dropped


@dataclass(kw_only=True)
class _Block:
    """Memory of the device."""

    stream: int  # which it was allocated on: it is given out again to what that stream does next
    nbytes: int
    recorded: set[int] = field(default_factory=set)  # streams that the allocator waits for


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy under way between the device and pinned memory, which the host has not waited for."""

    is_written: bool  # the pinned memory, by the device
    stream: int
    sequence: int  # of torch's race detector
    storage: torch.UntypedStorage  # pinned memory is kept until the copy is done


class Memory:
    """Blocks by the identity of their storage."""

    def __init__(self, order: EventHandler, find: Callable[[Finding], None]) -> None:
        self._order, self._find = order, find
        self._blocks: dict[int, _Block] = {}
        self._pinned: set[int] = set()
        self._copies: dict[int, _Copy] = {}
        self.nbytes = self.peak_nbytes = 0

    def allocate(self, inner: Tensor, stream: Stream) -> int:
        """The identity of the tensor's storage, which is allocated on this stream if it is new."""
        storage = inner.untyped_storage()
        key: int = storage._cdata
        if key not in self._blocks:
            nbytes = -(-storage.nbytes() // GRANULE_BYTES) * GRANULE_BYTES
            self._blocks[key] = _Block(stream=stream.cuda_stream, nbytes=nbytes)
            self._order.tensors_accessed.create_tensor(key, None)  # without a stack, which costs as much as a kernel's
            self.nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
            weakref.finalize(storage, self._free, key).atexit = False
        return key

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.nbytes -= block.nbytes
        used = self._order.tensors_accessed.accesses[key]
        for access in (*used.reads, *([] if used.write is None else [used.write])):
            is_safe = access.stream == block.stream or access.stream in block.recorded
            if not is_safe and not self._order.syncs.is_ordered_after(block.stream, access.seq_num, access.stream):
                detail = f"made on stream {block.stream}, last used by {access.operator} on stream {access.stream}"
                self._find(Finding(kind=GIVEN_BACK, detail=detail, stack=access.stack_trace))
        self._order._handle_memory_deallocation(key)

    def record(self, key: int, stream: Stream) -> None:
        """Do not give the block out again before what the stream has been given by then is done."""
        self._blocks[key].recorded.add(stream.cuda_stream)

    def pin(self, tensor: Tensor) -> Tensor:
        """A tensor of the host; from now on its memory is pinned, until it is given back."""
        storage = tensor.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata).atexit = False
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the host's tensor lies in pinned memory."""
        return tensor.untyped_storage()._cdata in self._pinned

    def begin_copy(self, tensor: Tensor, stream: Stream, *, is_written: bool) -> None:
        """The stream has been given a copy from or to this tensor in pinned memory."""
        if len(self._copies) > _MOST_COPIES:
            self._copies = {key: copy for key, copy in self._copies.items() if not self._is_done(copy)}
        storage = tensor.untyped_storage()
        self._copies[storage._cdata] = _Copy(
            is_written=is_written, stream=stream.cuda_stream, sequence=self._order.seq_num, storage=storage
        )

    @property
    def is_copying(self) -> bool:
        """Whether there are copies that the host may not have waited for."""
        return bool(self._copies)

    def touch(self, tensor: Tensor, *, is_written: bool) -> None:
        """The host reads or writes a tensor of its own."""
        if tensor.device.type != "cpu":
            return
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None or not (copy.is_written or is_written) or self._is_done(copy):
            return
        verb = "writes" if is_written else "reads"
        detail = f"the host {verb} {tuple(tensor.shape)} elements of a copy on stream {copy.stream}"
        self._find(Finding(kind=PINNED, detail=detail, stack=Stack()))

    def _is_done(self, copy: _Copy) -> bool:
        known: int = self._order.syncs.host_sync_state.get(copy.stream, -1)
        return known >= copy.sequence
