"""The cost of failures: odds, restarts, the best interval between checkpoints, and the goodput.

Failures of N GPUs are a Poisson process with N times the rate of one.
"""

import math
from dataclasses import dataclass, replace

# Meta's research clusters, 150 million GPU-hours: a failure in 47 days at 8 GPUs (1.1e-4 per GPU-hour), in 7.9 h at
# 1,024 (1.2e-4). Llama 3 405B had 419 in 54 days on 16,384 GPUs, 2e-5. (HPCA 2025; Llama 3 report)
FAILURES_PER_GPU_HOUR = 1.2e-4
# Median of 20 kills of efficientnet_b0, 3 ranks on busy CPUs without a keeper; large jobs take longer.
RESTART_S = 14.0


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """The failure rate of one GPU, and the downtime of a job after a failure."""

    per_gpu_hour: float = FAILURES_PER_GPU_HOUR
    restart_s: float = RESTART_S


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A job of some hours, and its failures."""

    hours: float
    odds: float  # of at least one interruption
    interruptions: float  # expected number
    between_s: float  # mean time between interruptions
    daly_s: float | None = None  # seconds between checkpoints; None if the time of a save is unknown
    goodput_restarts: float | None = None  # with checkpoints every daly_s


def odds(hours: float, gpus: int, per_gpu_hour: float) -> float:
    """Return 1 - (1 - p)^N, where p is the odds for one GPU in these hours."""
    return -math.expm1(-per_gpu_hour * hours * gpus)


def daly_s(save_s: float, between_s: float) -> float:
    """Return the higher-order optimum of Daly 2006, from the end of a save to the beginning of the next."""
    if save_s >= 2 * between_s:
        return between_s
    ratio = save_s / (2 * between_s)
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput_restarts(every_s: float, *, save_s: float, restart_s: float, between_s: float) -> float:
    """Return the goodput if each failure costs the work since the last checkpoint, and a restart.

    Daly's exact form: failures may also hit saves and restarts. The result is 1 without failures and saves.
    """
    exponent = (every_s + save_s) / between_s
    if exponent > 700:  # exp would overflow
        return 0.0
    return every_s / (between_s * math.exp(restart_s / between_s) * math.expm1(exponent))


def outlook(faults: FailureRates, *, gpus: int, hours: float, save_s: float | None) -> Outlook:
    """Predict the failures of a job."""
    rate = faults.per_gpu_hour * gpus
    between_s = 3600 / rate
    found = Outlook(
        hours=hours, odds=odds(hours, gpus, faults.per_gpu_hour), interruptions=rate * hours, between_s=between_s
    )
    if save_s is None:
        return found
    every_s = max(daly_s(save_s, between_s), 1e-9)
    return replace(
        found,
        daly_s=every_s,
        goodput_restarts=goodput_restarts(every_s, save_s=save_s, restart_s=faults.restart_s, between_s=between_s),
    )


def describe(faults: FailureRates, *, gpus: int, hours: float, save_s: float | None) -> tuple[str, str, str]:
    """Describe a job's expected failures, the best interval between checkpoints, and its goodput; one line each."""
    one = outlook(faults, gpus=gpus, hours=hours, save_s=save_s)
    job = f"{gpus} rank{'s' * (gpus > 1)} for {hours:g} h"
    expected = (
        f"{job}: interrupted with odds of {one.odds:.2%}, {one.interruptions:.2g} times on average "
        f"({faults.per_gpu_hour:g} failures per GPU-hour)"
    )
    if save_s is None:
        asked = "pass --save-s, which result.json of a run has as checkpoint_hold_s"
        return expected, f"time between checkpoints: {asked}", f"goodput: {asked}"
    interval = f"a checkpoint that takes {save_s:g} s: one every {one.daly_s:.0f} s (Daly 2006)"
    return expected, interval, f"goodput: {one.goodput_restarts:.2%} with --restarts ({faults.restart_s:g} s each)"
