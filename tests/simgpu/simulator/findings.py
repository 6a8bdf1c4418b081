"""What a simulated GPU finds wrong, and what the host waits for, each with its stack."""

import sys
import threading
import traceback
from pathlib import Path

SIMULATOR = Path(__file__).parent
PROJECT = SIMULATOR.parents[2]

MIXED = "tensors of mixed devices"
RACE = "race"
PINNED = "pinned memory is used before its copy is done"
WAIT = "the host waits"


class Finding:
    """Something that is wrong on a GPU, or that the host has waited for it: where Python stands now.

    `lines` are FILE:LINE FUNCTION of the project's frames, the innermost last, without those of the simulator. In a
    thread of autograd the stack goes on with that of the main thread, which waits for it.
    """

    def __init__(self, kind: str, detail: str) -> None:
        """The kind is MIXED, RACE, PINNED or WAIT."""
        self.kind, self.detail = kind, detail
        frames = [*traceback.walk_stack(sys._getframe(1))]
        if threading.current_thread() is not threading.main_thread():
            frames += traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
        places = [(Path(frame.f_code.co_filename), line, frame.f_code.co_qualname) for frame, line in reversed(frames)]
        self.lines = [
            f"{file.relative_to(PROJECT)}:{line} {function}"
            for file, line, function in places
            if file.is_relative_to(PROJECT) and "site-packages" not in file.parts and file.parent != SIMULATOR
        ]

    def passes(self, function: str) -> bool:
        """Whether a function of this qualified name is under way."""
        return any(line.endswith(f" {function}") for line in self.lines)

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.detail}", *self.lines])
