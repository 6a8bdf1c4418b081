"""What a simulated GPU finds wrong, and what the host waits for, each with its stack."""

import itertools
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

SIMULATOR = Path(__file__).parent
PROJECT = SIMULATOR.parents[2]

MIXED = "tensors of mixed devices"
RACE = "race"
PINNED = "pinned memory is used before its copy is done"
GIVEN_BACK = "memory is given back without record_stream"


class Stack:
    """Where Python stands. It is taken at every kernel, so it holds code and instruction, and finds lines when asked.

    In a thread of autograd the stack goes on with that of the main thread, which waits for it.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        places = []
        while frame is not None:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        main = threading.main_thread().ident
        if threading.get_ident() != main:
            frame = sys._current_frames().get(main or 0)
            while frame is not None:
                places.append((frame.f_code, frame.f_lasti))
                frame = frame.f_back
        self._places = places

    @classmethod
    def extract(cls, *_: object, **__: object) -> "Stack":
        """As torch's race detector takes a stack by traceback.StackSummary."""
        return cls()

    def reverse(self) -> None:
        """It is in order."""

    def lines(self) -> list[str]:
        """FILE:LINE FUNCTION of the project's frames, the innermost last, without those of the simulator."""
        places = [(Path(code.co_filename), code, lasti) for code, lasti in reversed(self._places)]
        return [
            f"{file.relative_to(PROJECT)}:{_line(code, lasti)} {code.co_qualname}"
            for file, code, lasti in places
            if file.is_relative_to(PROJECT) and "site-packages" not in file.parts and file.parent != SIMULATOR
        ]

    @property
    def innermost(self) -> str:
        """The last of the lines."""
        return next(reversed(self.lines()), "nowhere in the project")

    def passes(self, function: str) -> bool:
        """Whether a function of this qualified name is under way."""
        return any(code.co_qualname == function for code, _ in self._places)


def _line(code: CodeType, instruction: int) -> int | None:
    positions = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,))
    return positions[0]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong on a GPU."""

    kind: str  # MIXED, RACE, PINNED or GIVEN_BACK
    detail: str
    stack: Stack

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.detail}", *self.stack.lines()])


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The host has waited for the device."""

    reason: str
    stack: Stack

    def __str__(self) -> str:
        return "\n    ".join([f"the host waits: {self.reason}", *self.stack.lines()])


class HostWaitError(RuntimeError):
    """As torch says it where set_sync_debug_mode is 'error'."""
