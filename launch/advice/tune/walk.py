"""The walk through the remedies: what to start next, and the conclusions so far.

Whatever starts the program is passed in: a walk is resumed with one that first returns the starts of an earlier walk.
The search is greedy: a credited remedy is part of everything that is tried after it.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from launch.advice.tune.remedies import Remedy

PAIRS = 6  # of a comparison: noise alone makes all of them faster at most once in 64 trials
MIN_GAIN = 0.03  # in each pair; a smaller gain is never credited
# A remedy saves only a part of its share of a step, 16-bit gradients half of it: below this bound, too little is left.
MIN_CEILING = 1.1
FINAL_STARTS = 8  # for which the trials leave time: two pairs with everything credited, for each training
LEAST_LIMIT_S, LIMIT_TIMES = 60.0, 4.0  # of a start: this multiple of a start of the unchanged program
LEAST_LOSSES, DEVIATIONS = 10, 4  # standard errors by which the losses of another training differ, in each pair

Configuration = tuple[Remedy, ...]  # in the order in which they were credited
BASELINE: Configuration = ()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A start to be made."""

    configuration: Configuration
    profile: bool = False
    what: str  # for the user who waits


@dataclass(frozen=True, kw_only=True)
class Start:
    """The result of a start."""

    rate: float  # samples per second: the median of the windows, which ignores one disturbed by another job
    seconds: float  # from start to end
    problem: str | None = None  # why it has no rate
    shares: Mapping[str, float] = field(default_factory=dict)  # of a step, by the target of remedies
    epoch_samples: float | None = None
    losses: Sequence[float] = ()  # of its first steps


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The speedup of one configuration over another."""

    times: float  # the median of the pairs
    low: float  # of the slowest pair
    high: float  # of the fastest pair
    pairs: int

    @property
    def is_small(self) -> bool:
        """Whether a pair was below the minimum, so that more pairs change nothing."""
        return self.low < 1 + MIN_GAIN

    @property
    def is_credited(self) -> bool:
        return self.pairs >= PAIRS and not self.is_small


@dataclass(kw_only=True)
class RemedyTrial:
    """A remedy compared with the best configuration before it."""

    remedy: Remedy
    configuration: Configuration  # with the remedy
    gain: Gain | None = None  # as far as known
    problem: str | None = None  # why it has no gain

    @property
    def credited(self) -> bool:
        return self.problem is None and self.gain is not None and self.gain.is_credited

    @property
    def is_finished(self) -> bool:
        return self.problem is not None or self.credited or (self.gain is not None and self.gain.is_small)


@dataclass(kw_only=True)
class Walk:
    """The knowledge so far."""

    remedies: Sequence[Remedy]
    budget_s: float
    start: Callable[[Wanted, float], Start]  # makes a start, and ends it after these seconds
    same: Configuration = BASELINE  # the best unchanged training
    best: Configuration = BASELINE  # the best of all
    trials: list[RemedyTrial] = field(default_factory=list)
    baseline: Start | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    # Samples per second of the first and of the second configuration, in each pair of starts.
    pairs: dict[tuple[Configuration, Configuration], list[tuple[float, float]]] = field(default_factory=dict)
    losses: dict[tuple[Configuration, Configuration], list[tuple[float, float] | None]] = field(default_factory=dict)
    spent_s: float = 0.0
    starts: int = 0

    def run(self) -> None:
        """Walk to the end, or until the time is up. ValueError if the unchanged program cannot be measured."""
        self.shares = self._start(BASELINE, "profile of the program as it is", profile=True).shares
        self.baseline = self._start(BASELINE, "the program as it is")
        while self._has_room(2 + FINAL_STARTS) and (untried := self.untried()):
            self._try(untried[0])
        for configuration in dict.fromkeys((self.same, self.best)):
            problem = None
            while configuration != BASELINE and problem is None and self._has_room(2):
                if len(self.pairs.get((BASELINE, configuration), ())) >= PAIRS:
                    break
                problem = self._measure_pair(BASELINE, configuration, "everything credited")

    def untried(self) -> list[Remedy]:
        """Return the remedies without a conclusion that can help; first those that keep the training unchanged."""
        tried = {trial.remedy.name for trial in self.trials if trial.is_finished}
        left = [remedy for remedy in self.remedies if remedy.name not in tried and not self.cannot_help(remedy)]
        return sorted(left, key=lambda remedy: not remedy.same_training)

    def cannot_help(self, remedy: Remedy) -> bool:
        """Return whether a step without the part that the remedy shortens would be hardly faster.

        A part with the share s of the baseline's step bounds the gain by 1 / (1 - s); its share grows as others shrink.
        """
        share = self.shares.get(remedy.what_for)
        return share is not None and 1 - share * self.credited_gain(self.best) > 1 / MIN_CEILING

    def credited_gain(self, configuration: Configuration) -> float:
        """Return the product of the credited gains that have led to a configuration."""
        product = 1.0
        for trial in self.trials if configuration else ():
            if trial.credited and trial.gain is not None:
                product *= trial.gain.times
            if trial.configuration == configuration:
                break
        return product

    def gain(self, before: Configuration, after: Configuration) -> Gain | None:
        """Return the gain as far as it was measured."""
        ratios = [own / other for other, own in self.pairs.get((before, after), ())]
        if not ratios:
            return None
        return Gain(times=statistics.median(ratios), low=min(ratios), high=max(ratios), pairs=len(ratios))

    def enough_s(self) -> float:
        """Return the time in which all untried remedies could be credited, at the mean time of a start."""
        return self.spent_s * (1 + (2 * PAIRS * len(self.untried()) + FINAL_STARTS) / max(1, self.starts))

    def _try(self, remedy: Remedy) -> None:
        before, after = self.best, with_remedy(self.best, remedy)
        trial = RemedyTrial(remedy=remedy, configuration=after)
        self.trials.append(trial)
        while not trial.is_finished and self._has_room(2 + FINAL_STARTS):
            trial.problem = self._measure_pair(before, after, remedy.name)
            trial.gain = self.gain(before, after)
        if trial.credited and remedy.same_training:
            trial.problem = another_loss(self.losses[before, after])
        if trial.credited:
            if remedy.same_training and self.same == before:  # else it was tried on top of a changed training
                self.same = after
            self.best = after

    def _measure_pair(self, before: Configuration, after: Configuration, name: str) -> str | None:
        """Start each once, in turn A B and B A; return the problem of the one that fails."""
        pairs = self.pairs.setdefault((before, after), [])
        starts = {}
        for configuration in (before, after) if len(pairs) % 2 == 0 else (after, before):
            which = "with" if configuration == after else "without"
            start = self._start(configuration, f"{name}, pair {len(pairs) + 1}, {which}")
            if start.problem is not None:
                return start.problem if configuration == after else f"without it: {start.problem}"
            starts[configuration] = start
        pairs.append((starts[before].rate, starts[after].rate))
        differing = differing_losses(starts[before].losses, starts[after].losses)
        self.losses.setdefault((before, after), []).append(differing)
        return None

    def _start(self, configuration: Configuration, what: str, *, profile: bool = False) -> Start:
        limit_s = left_s = max(1.0, self.budget_s - self.spent_s)
        if self.baseline is not None:
            limit_s = max(LEAST_LIMIT_S, min(LIMIT_TIMES * self.baseline.seconds, left_s))
        what = f"{what} ({left_s / 60:.1f} minutes left)"
        start = self.start(Wanted(configuration=configuration, profile=profile, what=what), limit_s)
        self.spent_s += start.seconds
        self.starts += 1
        if start.problem is not None and self.baseline is None:
            raise ValueError(start.problem)
        return start

    def _has_room(self, starts: int) -> bool:
        return self.spent_s + starts * self.spent_s / self.starts <= self.budget_s


def differing_losses(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean losses of the steps that both starts took; None if they differ by no more than noise.

    Noise is the change from step to step before the remedy: the fall of a loss curve is not part of it.
    """
    steps = min(len(before), len(after))
    if steps < LEAST_LOSSES:
        return None
    means = statistics.fmean(before[:steps]), statistics.fmean(after[:steps])
    change = statistics.fmean(abs(late - early) for early, late in pairwise(before[:steps]))
    return means if abs(means[1] - means[0]) > DEVIATIONS * change / math.sqrt(steps) else None


def another_loss(pairs: Sequence[tuple[float, float] | None]) -> str | None:
    """Describe the losses if they differ to the same side in each pair; None if they do not."""
    differing = [pair for pair in pairs if pair is not None]
    if len(differing) < len(pairs) or len({after > before for before, after in differing}) != 1:
        return None
    before, after = (statistics.median(losses) for losses in zip(*differing, strict=True))
    return f"another training: mean loss {after:.4g} instead of {before:.4g}"


def with_remedy(configuration: Configuration, remedy: Remedy) -> Configuration:
    """Add a remedy to the configuration.

    It replaces remedies with the same first option or the same variables, and those that it does not work with.
    """

    def key(one: Remedy) -> tuple[str, ...]:
        return (*one.options[:1], *(name for name, _ in one.environment))

    left = (one for one in configuration if key(one) != key(remedy) and one.name not in remedy.not_with)
    return (*left, remedy)


def options_of(configuration: Configuration) -> tuple[str, ...]:
    """Return the options that are added to the command line."""
    return tuple(word for remedy in configuration for word in remedy.options)


def environment_of(configuration: Configuration) -> dict[str, str]:
    """Return the variables that are set for the ranks."""
    return {name: value for remedy in configuration for name, value in remedy.environment}
