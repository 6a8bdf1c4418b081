"""The contents of the absent GPU's memory, and their peak."""

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from hvdtrain.costs.shapes import ShapeTensor

# Minimum size and granularity of allocations (kMinBlockSize of torch's CUDACachingAllocator).
BLOCK_BYTES = 512


class Memory:
    """Counts the storages of tensors, rounded like the caching allocator's blocks; fragmentation is not modelled."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.forward_bytes = 0
        self._holders: dict[int, int] = {}  # number of tensors per storage, by the storage's id
        self._lock = threading.RLock()  # autograd releases tensors on another thread

    def hold(self, tensor: ShapeTensor) -> None:
        """Count the tensor's storage, unless already counted, until its last tensor is deleted."""
        storage = tensor.shape_only.untyped_storage()
        key, held_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            self._holders[key] = self._holders.get(key, 0) + 1
            if self._holders[key] == 1:
                self.live_bytes += held_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # The finalizer keeps the storage alive, so that its id is not reused before it is released.
        weakref.finalize(tensor, self._release, key, held_bytes, storage).atexit = False

    def _release(self, key: int, held_bytes: int, _: object) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.live_bytes -= held_bytes

    def end_forward(self) -> None:
        """Record the memory at the end of a forward pass, including saved tensors."""
        self.forward_bytes = max(self.forward_bytes, self.live_bytes)

    def restart(self) -> None:
        """Reset the peaks."""
        self.peak_bytes, self.forward_bytes = self.live_bytes, 0


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total size of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
