"""Settings for the run, its folder and its reports."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import AT_LEAST_1, FOLDER_NAME, NEUTRAL


def _program_name() -> str:
    """Return the name of the running file, or of its package; "run" if there is none."""
    file = Path(sys.argv[0])
    return {"__main__": file.parent.name, "-c": "", "-m": ""}.get(file.stem, file.stem) or "run"


@dataclass(frozen=True, kw_only=True)
class RunSettings(Group):
    """The folder of a run, and the interval of its reports."""

    title: ClassVar[str] = "the run, its folder and its reports"

    runs_dir: Annotated[Path, NEUTRAL] = Path("runs")
    """Folder of all experiments."""
    experiment: Annotated[str, FOLDER_NAME, NEUTRAL] = field(default_factory=_program_name)
    """Folder of the runs below runs-dir; the name of the program's file if not given."""
    run: Annotated[str | None, FOLDER_NAME, NEUTRAL] = None
    """Name of the run; date and time if not given."""
    overwrite: Annotated[bool, NEUTRAL] = False
    """Replace a finished run of the same name."""
    report_every_steps: Annotated[int, AT_LEAST_1, NEUTRAL] = 20
    """Steps between reports to TensorBoard and metrics.jsonl; the end of an epoch always has one."""
