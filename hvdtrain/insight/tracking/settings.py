"""Settings for the run, its folder and its reports."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import AT_LEAST_1, FOLDER_NAME, NEUTRAL, Auto, Rule


def _program_name() -> str:
    """Return the name of the running file, or of its package; "run" if there is none."""
    file = Path(sys.argv[0])
    return {"__main__": file.parent.name, "-c": "", "-m": ""}.get(file.stem, file.stem) or "run"


def _names_run(text: str) -> bool:
    """Return whether `text` is NAME, EXPERIMENT/NAME or EXPERIMENT/."""
    names = text.removesuffix("/").split("/")
    return len(names) <= (1 if text.endswith("/") else 2) and all(FOLDER_NAME.holds(name) for name in names)


RUN = Rule(holds=_names_run, text="must be NAME, EXPERIMENT/NAME or EXPERIMENT/. Put other folders into --runs-dir")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Group):
    """The folder of a run, and the interval of its reports."""

    title: ClassVar[str] = "the run, its folder and its reports"

    runs_dir: Annotated[Path, NEUTRAL] = Path("runs")
    """Folder of all experiments."""
    experiment: Annotated[str, FOLDER_NAME, NEUTRAL, Auto(why="--run takes it before a slash, as in mine/first")] = (
        field(default_factory=_program_name)
    )
    """Folder of the runs below runs-dir, unless run names one; the name of the program's file if not set."""
    run: Annotated[str | None, RUN, NEUTRAL] = None
    """NAME, EXPERIMENT/NAME or EXPERIMENT/: the run, and its folder below runs-dir. If not given, date and time, in a
    folder with the name of the program's file.
    """
    overwrite: Annotated[bool, NEUTRAL] = False
    """Replace a finished run of the same name."""
    report_every_steps: Annotated[int, AT_LEAST_1, NEUTRAL] = 20
    """Steps between reports to TensorBoard and metrics.jsonl; the end of an epoch always has one."""

    @property
    def run_names(self) -> tuple[str, str]:
        """The folders of the experiment and of the run, which is empty if not given."""
        experiment, _, run = (self.run or "").rpartition("/")
        return experiment or self.experiment, run
