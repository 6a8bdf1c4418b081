"""Settings for writing and reading checkpoints."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import AT_LEAST_0, AT_LEAST_1, NEUTRAL, POSITIVE, Auto, matching

# Per rank. One failure in 7.9 h on 1,024 GPUs: Meta's research clusters, 150 million GPU-hours (HPCA 2025).
FAILURES_PER_GPU_HOUR = 1.2e-4
FIRST_S = 60.0  # the interval until the first save has been measured
INTERVAL = matching(
    r"auto|\d{1,9}(\.\d{1,9})?s|[1-9]\d{0,8}steps",
    "must be auto, seconds as in 60s, or steps as in 100steps. 0s turns it off",
)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Group):
    """How much of a run is saved, and from where it is resumed."""

    title: ClassVar[str] = "checkpoints"

    resume_from: Annotated[int | None, AT_LEAST_0, NEUTRAL] = None
    """Go back to the checkpoint of this step, also in a finished run; what is newer is kept in after-STEP-N/. The same
    command again continues from the newest checkpoint.
    """
    checkpoint_every: Annotated[str, INTERVAL, NEUTRAL] = "300s"
    """Interval between checkpoints: seconds as in 60s, steps as in 100steps, or auto, which minimizes lost time, based
    on the time that saves have held the training and on failures_per_gpu_hour. 0s turns it off.
    """
    failures_per_gpu_hour: Annotated[
        float,
        POSITIVE,
        NEUTRAL,
        Auto(why="auto takes the rate of large clusters. For another interval, pass --checkpoint-every 60s"),
    ] = FAILURES_PER_GPU_HOUR
    """For --checkpoint-every auto: failures of a rank per hour, including its GPU and its share of the host."""
    keep: Annotated[int, AT_LEAST_1, NEUTRAL] = 2
    """Number of newest checkpoints to keep; the best weights are kept separately."""

    @property
    def checkpoint_every_s(self) -> float:
        """Seconds between checkpoints, for auto until the first; 0 if time does not count."""
        if self.checkpoint_every == "auto":
            return FIRST_S
        return 0.0 if self.checkpoint_every_steps is not None else float(self.checkpoint_every.removesuffix("s"))

    @property
    def checkpoint_every_steps(self) -> int | None:
        """Steps between checkpoints; None if steps do not count."""
        count, is_steps, _ = self.checkpoint_every.partition("steps")
        return int(count) if is_steps else None


def measured_interval(*, ranks: int, failures_per_gpu_hour: float) -> Callable[[float], float]:
    """Return a function from the seconds for which a save held the training to the seconds until the next save.

    They minimize lost time: sqrt(2 C M) (Young 1974), with the median save C so far, and the mean time M between
    failures of all ranks.
    """
    between_s, saves_s = 3600 / (ranks * failures_per_gpu_hour), list[float]()

    def next_s(save_s: float) -> float:
        saves_s.append(save_s)
        typical_s = statistics.median(saves_s)
        return max(math.sqrt(2 * typical_s * between_s), typical_s)

    return next_s
