"""Non-fatal failures: they are counted and reported, and the training continues."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from hvdtrain.safety.exits import print_message

# Names under which some failures are counted.
LOG_WRITE = "log write"
CHECKPOINT_WRITE = "checkpoint write"

QUIET_S = 60.0
# By name, because a rank may have neither Horovod nor MPI.
_COLLECTIVE_ERRORS = {"horovod.common.exceptions.HorovodInternalError", "mpi4py.MPI.Exception"}

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Counts failures by action, and warns at most once per cause and minute; thread-safe.

        with guard("log write", path): ...
        @guard("remote read")              the function returns None if it fails

    A cause is the action with the errno of the error, or with its type if it has no errno.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._warned_at: dict[tuple[str, object], float] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        action: str,
        target: Path | str = "",
        *,
        also_catch: tuple[type[Exception], ...] = (),
        on_failure: Callable[[Exception], object] | None = None,
    ) -> "Attempt":
        """Catch OSError and the types in `also_catch`, then call `on_failure`.

        A RuntimeError is caught only if its exact type is in `also_catch`, since errors of Horovod and MPI are
        RuntimeErrors. These errors, KeyboardInterrupt, SystemExit and out-of-memory errors are never caught.
        """
        return Attempt(guard=self, action=action, target=target, also_catch=also_catch, on_failure=on_failure)

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
        print_message("warning", f"{action} failed{': ' if target else ''}{target}: {reason}; training continues")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A guarded action: a context manager and a decorator that can be used any number of times."""

    guard: Guard
    action: str
    target: Path | str
    also_catch: tuple[type[Exception], ...]
    on_failure: Callable[[Exception], object] | None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or not self._catches(error):
            return False
        self.guard.note(self.action, self.target, error)
        if self.on_failure is not None:
            self.on_failure(error)
        return True

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            with self:
                return function(*args, **kwargs)
            return None

        return guarded

    def _catches(self, error: Exception) -> bool:
        if is_out_of_memory(error) or any(_full_name(kind) in _COLLECTIVE_ERRORS for kind in type(error).__mro__):
            return False
        if isinstance(error, RuntimeError):
            return type(error) in self.also_catch
        return isinstance(error, (OSError, *self.also_catch))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, a GPU or torch's CPU allocator (a plain RuntimeError) has run out of memory."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
