"""Tunes how the C library reuses the memory of freed tensors."""

import contextlib
import ctypes
import os

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for reuse, unless the user configures malloc or replaces it.

    By default glibc returns large blocks to the kernel, which must clear them before each use
    (docs/explanation/benchmarks.md). Call this before any thread has allocated, because glibc fixes the number of
    arenas then. Other C libraries are not changed.
    """
    if any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_MAX, 0)  # large blocks also come from the heap
        allocator.mallopt(_M_TRIM_THRESHOLD, -1)  # the heap never shrinks
        allocator.mallopt(_M_ARENA_MAX, 1)  # one: an arena per thread takes 64 MiB and is unmapped
