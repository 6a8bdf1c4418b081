"""The storages of the device, and the host's pinned memory: which copies of it are under way."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler

from tests.simgpu.simulator.findings import PINNED
from tests.simgpu.simulator.streams import Stream

_MOST_COPIES = 256  # that are remembered before those that the host has waited for are dropped


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy under way between the device and pinned memory, which the host has not waited for."""

    is_written: bool  # the pinned memory, by the device
    stream: int
    sequence: int  # of torch's race detector
    storage: torch.UntypedStorage  # pinned memory is kept until the copy is done


class Memory:
    """Storages by their identity."""

    def __init__(self, order: EventHandler, find: Callable[[str, str], None]) -> None:
        self._order, self._find = order, find
        self._storages: set[int] = set()  # of the device
        self._pinned: set[int] = set()
        self._copies: dict[int, _Copy] = {}

    def allocate(self, inner: Tensor) -> int:
        """The identity of the tensor's storage."""
        storage = inner.untyped_storage()
        key: int = storage._cdata
        if key not in self._storages:
            self._storages.add(key)
            self._order.tensors_accessed.create_tensor(key, None)  # without a stack, which costs as much as a kernel's
            weakref.finalize(storage, self._free, key).atexit = False
        return key

    def _free(self, key: int) -> None:
        self._storages.remove(key)
        self._order._handle_memory_deallocation(key)

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
        self._find(PINNED, detail)

    def _is_done(self, copy: _Copy) -> bool:
        known: int = self._order.syncs.host_sync_state.get(copy.stream, -1)
        return known >= copy.sequence
