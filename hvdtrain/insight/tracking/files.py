"""Files about a run: a full disk never stops the training, and leaves no half-written record."""

import contextlib
import json
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

from hvdtrain.settings.safety.files import new_file, part_file, write_atomically
from hvdtrain.settings.safety.guard import LOG_WRITE, Guard

# Records that wait for disk space: with a report every 20 steps, those of 200,000 steps.
MAX_PENDING_RECORDS = 10_000
RESULT_BYTES = 16_384


class RecordFile:
    """A file of records that are written atomically; if the disk is full, a record waits until the next write.

    SummaryWriter does neither: its thread leaves an incomplete record, at which TensorBoard stops reading, and raises
    the error at a later call, in the middle of the training.
    """

    def __init__(self, path: Path, guard: Guard, *, keep_bytes: int | None = None) -> None:
        """Append to the file if it exists, after truncating it to `keep_bytes` bytes if given."""
        self.path = path
        self._guard = guard
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING_RECORDS)
        self._lock = threading.Lock()  # a stop signal closes the file from another thread
        self._descriptor: int | None = None
        self._closed = False
        if keep_bytes is not None and self.size() > keep_bytes:
            with guard(LOG_WRITE, path):
                os.truncate(path, keep_bytes)
        self._write()

    def append(self, record: bytes) -> None:
        """Write a whole record, or keep it for later."""
        with self._lock:
            if not self._closed:
                self._pending.append(record)
                self._write()

    def size(self) -> int:
        """The size of the file in bytes."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0

    def close(self) -> None:
        """Write the waiting records, if there is space; nothing can be appended afterwards."""
        with self._lock:
            if self._pending:
                self._write()
            self._closed = True
            if self._descriptor is not None:
                with self._guard(LOG_WRITE, self.path):
                    os.close(self._descriptor)

    def _write(self) -> None:
        with self._guard(LOG_WRITE, self.path):
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                # Since an earlier attempt a pipe may have taken its place, which has no reader to wait for.
                self._descriptor = os.open(self.path, flags | os.O_NONBLOCK, 0o666)
            while self._pending:
                _append_record(self._descriptor, self._pending[0])
                self._pending.popleft()


def _append_record(descriptor: int, record: bytes) -> None:
    before = os.fstat(descriptor).st_size
    rest = memoryview(record)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def to_json(value: Any) -> bytes:
    """Return a document as JSON for readers."""
    return (json.dumps(value, indent=2, default=str) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write a document as JSON, atomically."""
    write_atomically(path, to_json(value))


def reserve(path: Path) -> None:
    """Reserve disk space for a file that `write_reserved` writes later, when the disk may be full."""
    with new_file(part_file(path)) as file:
        file.write(b" " * RESULT_BYTES)


def write_reserved(path: Path, value: Any) -> None:
    """Write JSON into the space of `reserve`, and rename it; without that space, like `write_json`."""
    try:
        with os.fdopen(os.open(part_file(path), os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
            file.write(to_json(value))
            file.truncate()
        part_file(path).replace(path)
    except OSError:  # it is gone, or is another file
        write_json(path, value)
