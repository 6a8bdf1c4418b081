"""Means of few runs, and whether two of them differ."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

RULE = (
    "A difference of two means counts where the 95 % interval of Welch's t test does not contain 0. With n = 1 the "
    "spread over seeds is not known, and nothing is claimed; with n = 2 or 3 only large differences can be shown. Each "
    "pair is judged by itself: of 20 pairs without a difference about one will seem to have one."
)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The mean of n runs."""

    mean: float
    deviation: float | None  # standard deviation of the runs (n - 1 in the denominator); None for one run
    n: int

    def scaled(self, factor: float) -> "Mean":
        """Return the mean of the runs' values times a factor."""
        deviation = None if self.deviation is None else factor * self.deviation
        return Mean(mean=factor * self.mean, deviation=deviation, n=self.n)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two means."""

    change: float
    half_width: float | None  # of its 95 % interval; None if the spread is unknown
    kind: Literal["inside", "outside", "unknown"]  # the spread over seeds


def compute_mean(values: Sequence[float]) -> Mean | None:
    """The mean of these values; None for no values."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Mean(mean=statistics.fmean(values), deviation=deviation, n=len(values))


def compare_means(mean: Mean, base: Mean) -> Difference:
    """Return `mean` minus `base`, with Welch's t interval (Welch 1947, degrees of freedom by Satterthwaite).

    The interval is unknown if one mean is of a single run, or if neither has any spread, which can happen by chance.
    """
    change = mean.mean - base.mean
    if mean.deviation is None or base.deviation is None or not mean.deviation + base.deviation:
        return Difference(change=change, half_width=None, kind="unknown")
    terms = [mean.deviation**2 / mean.n, base.deviation**2 / base.n]
    freedom = sum(terms) ** 2 / (terms[0] ** 2 / (mean.n - 1) + terms[1] ** 2 / (base.n - 1))
    half_width = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(terms))
    return Difference(change=change, half_width=half_width, kind="inside" if abs(change) <= half_width else "outside")
