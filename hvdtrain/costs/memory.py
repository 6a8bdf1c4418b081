"""The contents of the absent GPU's memory, and their peak."""

import weakref
from collections.abc import Iterable

from torch import Tensor

# Minimum size and granularity of allocations (kMinBlockSize of torch's CUDACachingAllocator).
BLOCK_BYTES = 512


class Memory:
    """Counts the storages of tensors, rounded like the caching allocator's blocks; fragmentation is not modelled."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.forward_bytes = 0
        self._storages: set[int] = set()

    def hold(self, tensor: Tensor) -> None:
        """Count the tensor's storage, unless already counted, until its last tensor is deleted."""
        storage = tensor.untyped_storage()
        key, held_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if key not in self._storages:
            self._storages.add(key)
            self.live_bytes += held_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._release, key, held_bytes).atexit = False

    def _release(self, key: int, held_bytes: int) -> None:
        self._storages.discard(key)
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
