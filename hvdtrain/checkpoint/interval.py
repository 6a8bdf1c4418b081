"""How often to save: as measured saves and a rate of failures ask for."""

import math
import statistics

# Of one rank. A failure in 7.9 h on 1,024 GPUs: Meta's research clusters, 150 million GPU-hours (HPCA 2025).
FAILURES_PER_GPU_HOUR = 1.2e-4
FIRST_S = 60.0  # until the first save has been measured


class MeasuredInterval:
    """The seconds between checkpoints that lose least time, from all saves so far."""

    def __init__(self, *, ranks: int, failures_per_gpu_hour: float) -> None:
        self._between_s = 3600 / (ranks * failures_per_gpu_hour)
        self._saves_s: list[float] = []

    def after(self, save_s: float) -> float:
        """Seconds to the next save after one that has held the training for `save_s`: sqrt(2 C M), Young 1974.

        C is the median save, M the mean time between failures of all ranks.
        """
        self._saves_s.append(save_s)
        typical_s = statistics.median(self._saves_s)
        return max(math.sqrt(2 * typical_s * self._between_s), typical_s)
