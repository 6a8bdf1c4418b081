"""Compares two configurations by pairs of consecutive starts: the gain, and its interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

FAMILY_LEVEL = 0.05  # all intervals of a walk hold together in 19 of 20 walks
MIN_GAIN = 0.03  # a smaller gain is never credited
MIN_PAIRS, MAX_PAIRS = 2, 6  # of a comparison, which is judged after each pair from the second on
NARROW = 1.5  # high over low of an interval that is not measured further
SLOWED = 1 / 1.5  # a remedy that slows a step this much, as threads that wait for cores do, has a noise of its own


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The speedup of one configuration over another."""

    times: float  # speedup at the mean of the pairs
    low: float
    high: float
    pairs: int
    reach: float  # `low` after the last pair, if the gain turns out two standard errors larger

    @property
    def is_credited(self) -> bool:
        """Whether the gain is significant, and large enough to matter."""
        return self.low > 1 and not self.is_small

    @property
    def is_small(self) -> bool:
        """Whether it is below the credited minimum, or a loss."""
        return self.times < 1 + MIN_GAIN

    @property
    def is_decided(self) -> bool:
        """Whether a trial needs no more pairs, or would not be decided by them."""
        return self.is_credited or self.is_small or self.pairs >= MAX_PAIRS or self.reach <= 1

    @property
    def is_narrow(self) -> bool:
        """Whether more pairs would tell little more."""
        return self.high <= NARROW * self.low


def gain(pairs: Sequence[tuple[float, float]], others: Sequence[Sequence[tuple[float, float]]], tests: int) -> Gain:
    """Return the gain in samples per second of the second over the first of each pair; at least two pairs.

    Logarithms of the ratios are treated as normal, with the deviation between pairs: windows of one start are
    correlated, and consecutive starts share the machine's drift, so a pair is the independent unit. The variance is
    pooled with that of the `others`, the pairs of earlier comparisons, unless the variance of these pairs is larger.
    The pool has no pairs of remedies that slow a step. This does not bias the variance, because mean and variance of
    normal samples are independent.
    The interval is Student's, corrected for `tests` candidates and the number of looks of a trial (Bonferroni).
    """
    own = _logs(pairs)
    repeated = [logs for logs in map(_logs, others) if len(logs) > 1]
    groups = [own, *(logs for logs in repeated if statistics.fmean(logs) > math.log(SLOWED))]
    degrees = sum(len(group) - 1 for group in groups)
    pooled = sum(statistics.variance(group) * (len(group) - 1) for group in groups) / degrees
    deviation = math.sqrt(max(pooled, statistics.variance(own)))
    level = FAMILY_LEVEL / (max(tests, 1) * (MAX_PAIRS - MIN_PAIRS + 1))
    middle, error = statistics.fmean(own), deviation / math.sqrt(len(own))
    margin = t_quantile(level, degrees) * error
    last_margin = t_quantile(level, degrees + MAX_PAIRS - len(own)) * deviation / math.sqrt(MAX_PAIRS)
    low, high, reach = map(_exp, (middle - margin, middle + margin, middle + 2 * error - last_margin))
    return Gain(times=math.exp(middle), low=low, high=high, pairs=len(own), reach=reach)


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(700.0, value)))


def _logs(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [math.log(own / other) for other, own in pairs]


@cache
def t_quantile(level: float, degrees: int) -> float:
    """Return the value that |t| of Student's distribution exceeds with probability `level`, by bisection."""
    low, high = 0.0, 1.0
    while _two_sided(high, degrees) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, degrees) > level else (low, middle)
    return high


def _two_sided(t: float, degrees: int) -> float:
    """Return the probability that |t| is exceeded: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for number in range(degrees // 2):
        total += term
        last = 2 * number + (2 if is_odd else 1)
        term *= cosine * cosine * last / (last + 1)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return max(0.0, 1 - inside)
