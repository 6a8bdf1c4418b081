"""How long an epoch will take on CPUs, measured on a few samples before the first step."""

import time
from collections.abc import Callable

from hvdtrain.ranks.comm import Comm

LONG_S = 600.0  # shorter epochs are not announced
ENOUGH_S = 1.0  # of a measurement


def long_epoch_s(comm: Comm, share: float, most: int, run: Callable[[int], object]) -> float | None:
    """Return about how many seconds an epoch takes by the slowest rank, without communication; None if it is short.

    `run` computes that many samples, at most `most`; all ranks call it together, because they may share cores. `share`
    are a rank's samples of an epoch. The first time includes what is done only once, so it is believed if it is short.
    """
    samples, is_first = min(2, most), True  # batch norm needs two
    while True:
        began = time.perf_counter()
        run(samples)
        took_s = float(max(comm.allgather(time.perf_counter() - began)))
        if (epoch_s := took_s / samples * share) < LONG_S:
            return None
        if not is_first and (took_s >= ENOUGH_S or samples == most):
            return epoch_s
        samples, is_first = samples if is_first else min(2 * samples, most), False


def in_words(seconds: float) -> str:
    """Format a long duration, such as 3 hours."""
    unit, unit_s = next(
        ((unit, s) for unit, s in (("days", 86_400), ("hours", 3600)) if seconds >= 2 * s), ("minutes", 60)
    )
    return f"{seconds / unit_s:.0f} {unit}"
