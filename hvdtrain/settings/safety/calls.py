"""The last collectives of this rank, recorded where they survive its end; hvdlaunch compares them after a hang.

The record is `<run>/ranks/rank-<r>.calls`, written through a shared mapping. It holds GROUPS parts, one for each group
of ranks that this rank belongs to: the group's name, then the last KEPT calls in a ring, each in RECORD_BYTES:

    number    uint64, from 1 in the order of this rank; 0 if unused
    bytes     uint64, sent by this rank
    waits     uint8, 1 until the call returns
    text      kind, name, place in hvdtrain and caller outside of it, separated by newlines; padded with zeros

launch/run/supervise/traces/calls.py reads it.
"""

import struct
import sys
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from types import FrameType, TracebackType

from hvdtrain.settings.safety.files import shared_file

GROUPS, KEPT, RECORD_BYTES = 6, 64, 128
_PART_BYTES = (1 + KEPT) * RECORD_BYTES
_CALL = struct.Struct("<QQB111s")
_WAITS_AT = 16
_MAKERS = ("hvdtrain.ranks.", "torch.")  # modules that make calls for others
WORLD, GRADIENTS = "world", "gradients"
EXCHANGES = "exchanges"  # between two ranks, in an order of each rank's own


class Calls:
    """The numbered calls of one group of ranks; `with calls.record(...)` surrounds a wait for the others.

    A call inside of another is a part of it. A call that fails keeps its mark of a waiting rank.
    """

    def __init__(self, memory: bytearray | mmap, start: int) -> None:
        """Record in this part of the memory, from `start` on."""
        self.memory, self._start = memory, start
        self.group = ""
        self._at = start + RECORD_BYTES  # of the last call
        self._count = self._depth = 0
        self._texts: dict[tuple[str, int, int], bytes] = {}  # of named calls, by name, code and instruction

    def restart(self, group: str) -> None:
        """Begin the sequence of this group."""
        self.group = group
        part = group.encode()[:RECORD_BYTES].ljust(_PART_BYTES, b"\0")
        self.memory[self._start : self._start + _PART_BYTES] = part
        self._count = self._depth = 0

    def record(self, kind: str, name: str = "", *, size: int = 0) -> "Calls":
        """Record a call of this kind and number of bytes, unless it is a part of another or too late.

        Only a call without a name looks for its caller in the whole stack: a name from inside hvdtrain is enough.
        """
        if self._depth or _is_overdue():
            return self
        frame = sys._getframe(2)
        if name:
            key = name, id(frame.f_code), frame.f_lasti
            text = self._texts.get(key)
            if text is None:
                caller = "" if _is_ours(frame) else _place(frame)
                text = self._texts[key] = f"{kind}\n{name}\n\n{caller}".encode()
        else:
            text = f"{kind}\n\n{_stack(frame)}".encode()
        self._count += 1
        self._at = self._start + (1 + self._count % KEPT) * RECORD_BYTES
        _CALL.pack_into(self.memory, self._at, self._count, size, 1, text)
        return self

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._depth -= 1
        if kind is None and not self._depth:
            self.memory[self._at + _WAITS_AT] = 0


_memory: bytearray | mmap = bytearray(GROUPS * _PART_BYTES)
_of_groups: dict[str, Calls] = {}
NOWHERE = Calls(bytearray(_PART_BYTES), 0)  # of a process without others


def _is_overdue() -> bool:
    """Return whether this rank was stopped for too long; replaced by the watchdog's."""
    return False


def of_group(name: str) -> Calls:
    """Return the calls of a group of ranks; its name differs from those of all other groups of the run."""
    if name not in _of_groups:
        _of_groups[name] = Calls(_memory, len(_of_groups) % GROUPS * _PART_BYTES)
        _of_groups[name].restart(name)
    return _of_groups[name]


def keep_in(run_folder: Path, rank: int, is_overdue: Callable[[], bool]) -> None:
    """Continue the record in the run folder; on a full disk it is lost with this process.

    A rank that was stopped and continues too late leaves its record alone: the others waited for it.
    """
    global _memory, _is_overdue  # noqa: PLW0603 (one record per process)
    _is_overdue = is_overdue
    file = shared_file(run_folder / "ranks" / f"rank-{rank}.calls", bytes(_memory))
    if file is not None:
        _memory = file
        for calls in _of_groups.values():
            calls.memory = file


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("hvdtrain.", "torch."))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _stack(start: FrameType) -> str:
    """Return the place in hvdtrain that needs the call, outside of the code that makes it, and the caller's place."""
    frame: FrameType | None = start
    inside = ""
    while frame is not None and _is_ours(frame):
        if not inside and not frame.f_globals["__name__"].startswith(_MAKERS):
            inside = f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{inside}\n{_place(frame) if frame else ''}"
