"""What lies in the absent GPU's memory, and how much it was at most."""

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from hvdtrain.costs.shapes import ShapeTensor

# What torch's caching allocator gives out at least, and in multiples of (kMinBlockSize of its CUDACachingAllocator).
BLOCK_BYTES = 512


class Memory:
    """Storages that tensors hold, counted as the caching allocator rounds them; without its fragmentation."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.forward_bytes = 0
        self._holders: dict[int, int] = {}  # how many tensors a storage has, by its identity
        self._lock = threading.RLock()  # autograd lets tensors go on a thread of its own

    def hold(self, tensor: ShapeTensor) -> None:
        """Count the tensor's storage, if no other tensor has it, until the last one that has it is gone."""
        storage = tensor.shape_only.untyped_storage()
        key, held_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            self._holders[key] = self._holders.get(key, 0) + 1
            if self._holders[key] == 1:
                self.live_bytes += held_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # It keeps the storage, so that no other gets its identity before it is counted as gone.
        weakref.finalize(tensor, self._release, key, held_bytes, storage).atexit = False

    def _release(self, key: int, held_bytes: int, _: object) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.live_bytes -= held_bytes

    def end_forward(self) -> None:
        """A forward pass has ended: what it has saved is there."""
        self.forward_bytes = max(self.forward_bytes, self.live_bytes)

    def restart(self) -> None:
        """Look for the largest amounts anew."""
        self.peak_bytes, self.forward_bytes = self.live_bytes, 0


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all elements of these."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
