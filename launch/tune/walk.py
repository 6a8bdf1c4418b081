"""The walk through the remedies: the next start, and the conclusions so far. Pure: nothing is started.

A walk is a generator that yields the configuration to start and receives the Start. To resume, recorded starts are sent
again. The search is greedy: a credited remedy is part of everything that is tried after it.
"""

import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launch.tune.compare import MAX_PAIRS, MIN_PAIRS, Gain, gain
from launch.tune.remedies import Remedy

# A remedy saves only a part of its share of a step, 16-bit gradients half of it: below this bound, too little is left.
MIN_CEILING = 1.1

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

    rates: tuple[float, ...]  # samples per second of each window after the warm-up
    seconds: float  # from start to end
    problem: str | None = None  # why it has no windows
    shares: Mapping[str, float] = field(default_factory=dict)  # of a step, by the target of remedies
    epoch_samples: float | None = None

    @property
    def rate(self) -> float:
        """The samples per second of the whole start: the median, which ignores a window disturbed by another job."""
        return statistics.median(self.rates)


@dataclass(kw_only=True)
class Trial:
    """A remedy compared with the best configuration before it."""

    remedy: Remedy
    before: Configuration  # the best so far
    configuration: Configuration  # with the remedy
    windows: int = 0
    gain: Gain | None = None  # as far as known
    credited: bool = False
    problem: str | None = None  # why it has no gain


@dataclass(kw_only=True)
class Walk:
    """The knowledge so far."""

    remedies: Sequence[Remedy]
    budget_s: float
    same: Configuration = BASELINE  # the best unchanged training
    best: Configuration = BASELINE  # the best of all
    trials: list[Trial] = field(default_factory=list)
    baseline: list[Start] = field(default_factory=list)
    shares: Mapping[str, float] = field(default_factory=dict)
    # Samples per second of the first and of the second configuration, in each pair of starts.
    pairs: dict[tuple[Configuration, Configuration], list[tuple[float, float]]] = field(default_factory=dict)
    spent_s: float = 0.0
    starts: int = 0
    is_complete: bool = False  # everything that can help was tried

    def steps(self) -> Generator[Wanted, Start, None]:
        """Yield the starts; each depends on the result of the previous one. ValueError if the baseline fails."""
        profiled = yield from self._start_baseline("profile of the program as it is", profile=True)
        self.shares = profiled.shares
        self.baseline.append((yield from self._start_baseline("the program as it is")))
        while (remedy := self.next_remedy()) is not None:
            if not self._has_room(2 * MIN_PAIRS + self._final_starts()):
                break
            yield from self._try(remedy)
        self.is_complete = self.next_remedy() is None
        yield from self._measure_totals()

    def next_remedy(self) -> Remedy | None:
        """Return the first untried remedy that can help, preferring those that keep the training unchanged."""
        tried = {trial.remedy.name for trial in self.trials}
        untried = [remedy for remedy in self.remedies if remedy.name not in tried and not self.cannot_help(remedy)]
        return min(untried, key=lambda remedy: not remedy.same_training, default=None)

    def ceiling(self, what_for: str) -> float | None:
        """Return the maximum speedup of a step without a part; None if its share is unknown.

        The bound is 1 / (1 - s) with the share s of the baseline's step; the share grows as other parts shrink.
        """
        share = self.shares.get(what_for)
        if share is None:
            return None
        left = 1 - share * self.credited_gain(self.best)
        return 1 / left if left > 0 else float("inf")

    def cannot_help(self, remedy: Remedy) -> bool:
        """Return whether the part of the step that the remedy shortens is too small."""
        ceiling = self.ceiling(remedy.what_for)
        return ceiling is not None and ceiling < MIN_CEILING

    def credited_gain(self, configuration: Configuration) -> float:
        """Return the product of the credited gains that have led to a configuration."""
        product = 1.0
        for trial in self.trials if configuration else ():
            if trial.credited and trial.gain is not None:
                product *= trial.gain.times
            if trial.configuration == configuration:
                break
        return product

    def total(self, configuration: Configuration) -> Gain | None:
        """Return the directly measured gain over the baseline, if any."""
        return self._gain(BASELINE, configuration)

    def enough_s(self) -> float:
        """Estimate the time for all untried remedies, at the mean time of a start, with two pairs per trial."""
        starts = 2 * MIN_PAIRS * len(list(untried(self))) + self._final_starts()
        return self.spent_s * (1 + starts / max(1, self.starts))

    def baseline_is_late(self, start: Start) -> bool:
        """Return whether this start of the unchanged program has used up the budget without a result."""
        return len(self.baseline) < 1 and start.problem is not None and self.spent_s + start.seconds >= self.budget_s

    def _try(self, remedy: Remedy) -> Generator[Wanted, Start, None]:
        trial = Trial(remedy=remedy, before=self.best, configuration=with_remedy(self.best, remedy))
        self.trials.append(trial)
        while trial.gain is None or not trial.gain.is_decided:
            if trial.gain is not None and not self._has_room(2 + self._final_starts()):
                break
            before, own = yield from self._pair(trial.before, trial.configuration, remedy.name)
            if before.problem is not None or own.problem is not None:
                trial.problem = own.problem or f"without it: {before.problem}"
                break
            trial.windows += len(own.rates)
            trial.gain = self._gain(trial.before, trial.configuration)
        if trial.problem is None and trial.gain is not None and trial.gain.is_credited:
            trial.credited = True
            if remedy.same_training and self.same == self.best:  # else it was tried on top of a changed training
                self.same = trial.configuration
            self.best = trial.configuration

    def _measure_totals(self) -> Generator[Wanted, Start, None]:
        """Compare the baseline with everything credited: twice, then as long as the interval is wide."""
        for most in (MIN_PAIRS, MAX_PAIRS):
            for configuration in dict.fromkeys((self.same, self.best)):
                while configuration != BASELINE and not self._is_enough(configuration, most):
                    if not self._has_room(2):
                        return
                    before, own = yield from self._pair(BASELINE, configuration, "everything credited")
                    if before.problem is not None or own.problem is not None:
                        break

    def _is_enough(self, configuration: Configuration, most: int) -> bool:
        total = self.total(configuration)
        return total is not None and (total.pairs >= most or total.is_narrow)

    def _pair(
        self, before: Configuration, after: Configuration, name: str
    ) -> Generator[Wanted, Start, tuple[Start, Start]]:
        """Start each once, alternating between A B and B A; the second is skipped if the new one fails first."""
        pairs = self.pairs.setdefault((before, after), [])
        what = f"{name}, pair {len(pairs) + 1}"
        if len(pairs) % 2 == 0:
            first = yield from self._start(before, f"{what}, without")
            second = yield from self._start(after, f"{what}, with")
        else:
            second = yield from self._start(after, f"{what}, with")
            if second.problem is not None:
                return second, second
            first = yield from self._start(before, f"{what}, without")
        if first.problem is None and second.problem is None:
            pairs.append((first.rate, second.rate))
        return first, second

    def _start_baseline(self, what: str, *, profile: bool = False) -> Generator[Wanted, Start, Start]:
        start = yield from self._start(BASELINE, what, profile=profile)
        if start.problem is not None:
            raise ValueError(start.problem)
        return start

    def _start(
        self, configuration: Configuration, what: str, *, profile: bool = False
    ) -> Generator[Wanted, Start, Start]:
        start = yield Wanted(configuration=configuration, profile=profile, what=what)
        self.spent_s += start.seconds
        self.starts += 1
        return start

    def _gain(self, before: Configuration, after: Configuration) -> Gain | None:
        pairs = self.pairs.get((before, after), [])
        others = [other for other in self.pairs.values() if other is not pairs]
        return gain(pairs, others, len(self.remedies)) if len(pairs) >= MIN_PAIRS else None

    def _has_room(self, starts: int) -> bool:
        return self.spent_s + starts * self.spent_s / self.starts <= self.budget_s

    def _final_starts(self) -> int:
        """Return the number of starts for the totals after one more credit; a trial against the baseline is a total."""
        keeps_same = self.same != BASELINE and self.total(self.same) is None
        return 2 * MIN_PAIRS * (keeps_same + (self.best != BASELINE))


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


def untried(walk: Walk) -> Iterator[Remedy]:
    """Yield the remedies for which the budget had no time."""
    tried = {trial.remedy.name for trial in walk.trials}
    return (remedy for remedy in walk.remedies if remedy.name not in tried and not walk.cannot_help(remedy))
