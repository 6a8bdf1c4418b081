"""A machine that is not there: the windows of its starts are drawn, with noise as shared machines have it."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launch.tune.remedies import Remedy
from launch.tune.walk import Start, Walk, Wanted
from launch.tune.windows import COUNTED


def remedy(
    name: str,
    *,
    what_for: str = "computation",
    same: bool = True,
    options: tuple[str, ...] = (),
    not_with: tuple[str, ...] = (),
) -> Remedy:
    words = options or (f"--{name}",)
    return Remedy(name=name, options=words, what_for=what_for, same_training=same, not_with=not_with)


@dataclass(kw_only=True)
class Machine:
    """Drifts over the walk, and differs between starts and between windows, neighbours of which are alike."""

    draws: random.Random
    times: Mapping[str, float] = field(default_factory=dict)  # as fast, by remedy
    problems: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    of_starts: float = 0.02
    of_windows: float = 0.05
    alike: float = 0.6  # the correlation of a window with the one before
    drift: float = 0.1  # of a slow wave
    loads: float = 0.05  # how often another job is there for a start
    seconds: float = 10.0
    starts: int = 0

    def start(self, wanted: Wanted) -> Start:
        self.starts += 1
        names = [remedy.name for remedy in wanted.configuration]
        for name in names:
            if name in self.problems:
                return Start(rates=(), seconds=self.seconds, problem=self.problems[name])
        speed = 100 * math.prod(self.times.get(name, 1.0) for name in names)
        speed *= math.exp(self.draws.gauss(0, self.of_starts) + self.drift * math.sin(self.starts / 7))
        if self.draws.random() < self.loads:
            speed *= 0.85
        noise, rates = self.draws.gauss(0, self.of_windows), []
        for _ in range(COUNTED):
            noise = self.alike * noise + self.draws.gauss(0, self.of_windows * math.sqrt(1 - self.alike**2))
            rates.append(speed * math.exp(noise))
        return Start(rates=tuple(rates), seconds=self.seconds, shares=self.shares if wanted.profile else {})


def walked(walk: Walk, answer: Callable[[Wanted], Start]) -> list[Wanted]:
    """Walk to the end; what was wanted on the way."""
    steps, wanted = walk.steps(), []
    try:
        wanted.append(next(steps))
        while True:
            wanted.append(steps.send(answer(wanted[-1])))
    except StopIteration:
        return wanted
