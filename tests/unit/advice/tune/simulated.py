"""A machine that is not there: the windows of its starts are drawn, with noise as shared machines have it."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.advice.tune.remedies import Remedy
from launch.advice.tune.walk import Start, Walk, Wanted
from launch.advice.tune.windows import COUNTED

QUIET = {"of_starts": 0.001, "of_windows": 0.001, "drift": 0.0, "loads": 0.0}


def remedy(name, *, what_for="computation", same=True, options=(), not_with=()) -> Remedy:
    words = options or (f"--{name}",)
    return Remedy(name=name, options=words, what_for=what_for, same_training=same, not_with=not_with)


@dataclass(kw_only=True)
class Machine:
    """Drifts over the walk, and differs between starts and between windows, neighbours of which are alike."""

    seed: int = 0
    times: Mapping[str, float] = field(default_factory=dict)  # as fast, by remedy
    problems: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    of_starts: float = 0.02
    of_windows: float = 0.05
    alike: float = 0.6  # the correlation of a window with the one before
    drift: float = 0.1  # of a slow wave
    loads: float = 0.05  # how often another job is there for a start
    seconds: float = 10.0
    losses: Mapping[str, float] = field(default_factory=dict)  # how much higher, by remedy
    wanted: list[Wanted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)  # noqa: S311 (a simulation)

    @property
    def starts(self) -> int:
        return len(self.wanted)

    def start(self, wanted: Wanted, _: float = 0) -> Start:
        self.wanted.append(wanted)
        names = [remedy.name for remedy in wanted.configuration]
        for name in names:
            if name in self.problems:
                return Start(rate=0.0, seconds=self.seconds, problem=self.problems[name])
        speed = 100 * math.prod(self.times.get(name, 1.0) for name in names)
        speed *= math.exp(self.draws.gauss(0, self.of_starts) + self.drift * math.sin(self.starts / 7))
        if self.draws.random() < self.loads:
            speed *= 0.85
        noise, rates = self.draws.gauss(0, self.of_windows), []
        for _ in range(COUNTED):
            noise = self.alike * noise + self.draws.gauss(0, self.of_windows * math.sqrt(1 - self.alike**2))
            rates.append(speed * math.exp(noise))
        shares = self.shares if wanted.profile else {}
        draws, higher = random.Random(self.starts), sum(self.losses.get(name, 0.0) for name in names)  # noqa: S311
        losses = [1 - step / 100 + higher + draws.gauss(0, 0.1) for step in range(60 + self.starts % 7)]
        return Start(rate=statistics.median(rates), seconds=self.seconds, shares=shares, losses=losses)


def walked(remedies: Sequence[Remedy], machine: Machine, *, budget_s: float = 1e9) -> Walk:
    walk = Walk(remedies=remedies, budget_s=budget_s, start=machine.start)
    walk.run()
    return walk
