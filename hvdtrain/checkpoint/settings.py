"""When checkpoints are written and read."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import ASIDE, AT_LEAST_0, AT_LEAST_1, Chosen


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Group):
    """How much of a run is kept, and whether it goes on."""

    title: ClassVar[str] = "checkpoints"

    resume: Annotated[
        Literal["auto", "never"],
        ASIDE,
        Chosen(why="a run resumes. To start anew, give another --run or remove its folder"),
    ] = "auto"
    """auto resumes from the run's newest valid checkpoint, if it has any; never starts anew."""
    checkpoint_every_s: Annotated[float, AT_LEAST_0, ASIDE] = 300.0
    """Seconds between checkpoints; 0 for none by the clock."""
    checkpoint_every_steps: Annotated[int | None, AT_LEAST_1, ASIDE] = None
    """Steps between checkpoints, besides those by the clock."""
    keep: Annotated[int, AT_LEAST_1, ASIDE] = 2
    """Newest checkpoints to keep; the best weights are kept apart."""
