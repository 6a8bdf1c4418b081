"""What rank 0 reports to the launcher of its run, in the file that HVDLAUNCH_REPORT names."""

import json
from dataclasses import dataclass
from pathlib import Path

from launch.files import read_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """What rank 0 has reported so far; a program that is not ours reports nothing."""

    run_folder: str | None = None
    checkpoint: int | None = None  # the newest step that is saved
    saves: bool = False  # at SIGUSR1 the program saves and leaves
    exit_reason: str | None = None  # finished, preempted...
    explanation: str | None = None  # the line with which the program itself has explained its failure


def read_report(file: Path) -> Report:
    """The report as it stands; an empty one where the file is missing or is no report."""
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
