"""Rank 0's report to its launcher, in the file that HVDLAUNCH_REPORT names."""

from dataclasses import dataclass
from pathlib import Path

from launch.documents import Document, parse
from launch.files import read_text

MAX_DIGITS = 19  # of a step


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
        known = Document(parse(read_text(file))).values
    except (OSError, ValueError):
        return Report()
    texts = {key: value for key, value in known.items() if isinstance(value, str)}
    step = texts.get("checkpoint", "")
    return Report(
        run_folder=texts.get("run_folder"),
        checkpoint=int(step) if step.isdecimal() and len(step) < MAX_DIGITS else None,
        saves=texts.get("saves") == "yes",
        exit_reason=texts.get("exit_reason"),
        explanation=texts.get("said"),
    )
