"""Rank 0's report to its launcher, in the file that HVDLAUNCH_REPORT names."""

import json
from dataclasses import dataclass
from pathlib import Path

from launch.files import read_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """Rank 0's report so far; empty for programs without hvdtrain."""

    run_folder: str | None = None
    checkpoint: int | None = None  # the newest saved step
    saves: bool = False  # the program saves and stops at SIGUSR1
    exit_reason: str | None = None  # finished, preempted...
    explanation: str | None = None  # the program's own explanation of its failure


def read_report(file: Path) -> Report:
    """Read the report; return an empty one if the file is missing or malformed."""
    try:
        known = dict(json.loads(read_text(file)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Report()
    step = str(known.get("checkpoint"))
    return Report(
        run_folder=known.get("run_folder"),
        checkpoint=int(step) if step.isdecimal() else None,
        saves=known.get("saves") == "yes",
        exit_reason=known.get("exit_reason"),
        explanation=known.get("said"),
    )
