"""Non-fatal failures: they are counted and reported, and the training continues."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hvdtrain.settings.safety.exits import print_message

# Names under which some failures are counted.
LOG_WRITE = "log write"
CHECKPOINT_WRITE = "checkpoint write"

QUIET_S = 60.0


class Guard:
    """Counts failures by action, and warns at most once per cause and minute; thread-safe.

        with guard("log write", path): ...

    A cause is the action with the errno of the error, or with its type if it has no errno.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._warned_at: dict[tuple[str, object], float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, action: str, target: Path | str) -> Iterator[None]:
        """Catch and count an OSError; all others, such as those of Horovod, MPI and full memory, are raised."""
        try:
            yield
        except OSError as error:
            self.note(action, target, error)

    def note(self, action: str, target: Path | str, error: Exception) -> None:
        """Count a failure, and warn unless this cause was reported in the last minute."""
        cause = (action, error.errno if isinstance(error, OSError) and error.errno else type(error))
        now = time.monotonic()
        with self._lock:
            self.counts[action] += 1
            if now - self._warned_at.get(cause, -QUIET_S) < QUIET_S:
                return
            self._warned_at[cause] = now
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        print_message("warning", f"{action} failed: {target}: {reason}; training continues")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, a GPU or torch's CPU allocator (a plain RuntimeError) has run out of memory."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)
