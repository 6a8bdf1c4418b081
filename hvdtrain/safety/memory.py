"""What the C library does with the memory of freed tensors."""

import contextlib
import ctypes
import os

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones, but for settings or allocators of the user.

    glibc gives large pieces back to the kernel, which must clear them before each use
    (docs/explanation/benchmarks.md). Must come before any thread has allocated: glibc settles then how many arenas
    there will be. Other C libraries are left as they are.
    """
    if any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_MAX, 0)  # large pieces come from the heap too
        allocator.mallopt(_M_TRIM_THRESHOLD, -1)  # and the heap never shrinks
        allocator.mallopt(_M_ARENA_MAX, 1)  # there is one: those of threads, as Horovod's, hold 64 MiB and are unmapped
