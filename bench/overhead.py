"""What our loop costs besides the training itself: one process against the shortest loop, and each feature's price.

    python bench/overhead.py                                  about three minutes on 2 cores
    mpirun -np 2 python bench/overhead.py                     the features alone

Both loops run in one process over the same tensors, with the same model and optimizer, without moving average,
augmentation or smoothing: before each of our steps, taken as in a run, the shortest loop makes one
of its own. Then all features are off but one, which is switched on and off from step to step. On a GPU a turn is of 20
steps, and the device is waited for in between.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from ours import Epoch, our_loop
from pairs import Table, middle
from torch import Tensor, nn
from workload import WARMUP_STEPS, network, optimizer_of, tensors

from hvdtrain.core import slots
from hvdtrain.core.finite import not_finite
from hvdtrain.core.phases import OFF, Phase, Phases, StepMeans
from hvdtrain.core.step import Statistics
from hvdtrain.loop.save_points import NEVER, Decision, SavePoints
from hvdtrain.profiling.passes import make_clock

TIMES = "a step takes so many times as long"
GOAL = "<= 1.03"
NO_REPORTS = 10**9  # steps between two
BLOCK = 20 if torch.cuda.is_available() else 1  # steps of a turn


class SwitchedSavePoints:
    """Asked for at every step, or not."""

    def __init__(self, real: SavePoints) -> None:
        self.on = True
        self._real = real

    def decide(self, step: int) -> Callable[[], Decision]:
        return (self._real if self.on else NEVER).decide(step)

    def saved(self, held_s: float) -> None:
        self._real.saved(held_s)


class SwitchedPhases:
    """A clock that runs, or not."""

    isolated, uniform_steps = OFF.isolated, OFF.uniform_steps

    def __init__(self, real: Phases) -> None:
        self.on = False
        self._real = real

    def enter(self, phase: Phase) -> None:
        (self._real if self.on else OFF).enter(phase)

    def end_step(self) -> None:
        (self._real if self.on else OFF).end_step()

    def means(self) -> StepMeans | None:
        return self._real.means()

    def close(self) -> None:
        self._real.close()


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One that can be left out."""

    name: str
    switch: Callable[[bool], None]
    every_steps: int = 1  # a run pays for it once in so many; switched on it is paid for at each


def features(loop: Epoch, phases: SwitchedPhases) -> list[Feature]:
    """All that can be switched from step to step."""
    step, watch, reports, points = loop.step, loop.watch, loop.reports, SwitchedSavePoints(loop.points)
    loop.points = points
    average, statistics = step.average, step.statistics
    none = Statistics(nn.Linear(1, 1, device=step.device))

    def unchecked(*_: object) -> Tensor:
        return torch.zeros((), device=step.device)

    def switch_watch(on: bool) -> None:
        watch.on = on
        step.slots.comm.wait_context = watch.collective if on else contextlib.nullcontext

    return [
        Feature(name="moving average (EMA)", switch=lambda on: setattr(step, "average", average if on else None)),
        Feature(name="NaN agreement", switch=lambda on: setattr(slots, "not_finite", not_finite if on else unchecked)),
        Feature(name="statistics guard", switch=lambda on: setattr(step, "statistics", statistics if on else none)),
        Feature(
            name="reports",
            switch=lambda on: setattr(reports, "every_steps", 1 if on else NO_REPORTS),
            every_steps=loop.config.report_every_steps,
        ),
        Feature(name="watchdog", switch=switch_watch),
        Feature(name="save points", switch=lambda on: setattr(points, "on", on)),
        Feature(name="phases (--profile)", switch=lambda on: setattr(phases, "on", on)),
    ]


def now(device: torch.device) -> float:
    """Seconds by the host's clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def turns(loop: Epoch, between: Callable[[int], None]) -> list[float]:
    """Seconds of a step in each turn of our loop, after a warm-up; `between` is called before turn 0, 1, ..."""
    device, spent_s = loop.step.device, []
    taken, since = itertools.count(), 0.0

    def begins() -> None:
        nonlocal since
        turn, inside = divmod(next(taken), BLOCK)
        if not inside:
            spent_s.append((now(device) - since) / BLOCK)
            between(turn)
            since = now(device)

    loop.watch.begins = begins
    loop.run()
    begins()
    return spent_s[1 + WARMUP_STEPS :]  # before the first turn was none


def against_the_shortest(loop: Epoch, batch: int) -> tuple[list[float], list[float]]:
    """Seconds of our steps, and of those of bench/peers/plain.py, by turns."""
    device = loop.step.device
    model = network(loop.config.model).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(model)
    given = itertools.cycle(tensors(batch, device, rank=0))
    shortest_s = []

    def shortest(_: int) -> None:
        since = now(device)
        for images, labels in itertools.islice(given, BLOCK):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        shortest_s.append((now(device) - since) / BLOCK)

    model.train()
    ours_s = turns(loop, shortest)
    return ours_s, shortest_s[WARMUP_STEPS:-1]  # after the last of ours was one more


def on_and_off(loop: Epoch, feature: Feature) -> tuple[list[float], list[float]]:
    """Seconds of the steps with the feature and without it, pair by pair."""

    def is_on(turn: int) -> bool:  # on off, off on, on off, ...
        return turn % 4 in (0, 3)

    spent_s = turns(loop, lambda turn: feature.switch(is_on(turn)))
    feature.switch(False)
    states = [is_on(WARMUP_STEPS + place) for place in range(len(spent_s))]
    with_s = [one for one, on in zip(spent_s, states, strict=True) if on]
    without_s = [one for one, on in zip(spent_s, states, strict=True) if not on]
    return with_s, without_s


def row(what: str, with_s: list[float], without_s: list[float], *, every_steps: int = 1) -> dict[str, Any]:
    """From times by pairs."""
    prices_s = [(one - other) / every_steps for one, other in zip(with_s, without_s, strict=True)]
    times = [1 + price / other for price, other in zip(prices_s, without_s, strict=True)]
    return {"what": what, TIMES: middle(times), "ms per step": middle([1000 * price for price in prices_s])}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="efficientnet_b0")
    arguments.add_argument("--batch", type=int, default=16, help="samples per rank and step")
    arguments.add_argument("--pairs", type=int, default=300, help="of our loop and the shortest")
    arguments.add_argument("--feature-pairs", type=int, default=100)
    chosen = arguments.parse_args()

    table = Table(
        name="overhead",
        question=f"{chosen.model}, batch {chosen.batch}: a step of our loop (goal {GOAL}), and each feature's price:",
        columns=["what", TIMES, "ms per step"],
    )
    rows = []
    with our_loop(chosen.model, chosen.batch, steps=BLOCK * (WARMUP_STEPS + chosen.pairs)) as loop:
        alone = loop.step.slots.comm.size == 1
        if alone:
            rows.append(row("ours, against the shortest loop", *against_the_shortest(loop, chosen.batch)))
    phases = SwitchedPhases(make_clock("on", loop.step.device, lambda: None))
    length = BLOCK * (WARMUP_STEPS + 2 * chosen.feature_pairs)
    with our_loop(chosen.model, chosen.batch, steps=length, phases=phases, ema_epochs=2.0) as loop:
        switchable = features(loop, phases)
        for feature in switchable:
            feature.switch(False)
        if alone:
            rows.append(row("the same without all that follows", *against_the_shortest(loop, chosen.batch)))
        rows += [row(one.name, *on_and_off(loop, one), every_steps=one.every_steps) for one in switchable]
    if loop.step.slots.comm.rank == 0:
        table.about |= {"ranks": loop.step.slots.comm.size}
        for one in rows:
            table.add(**one)
        table.write()


if __name__ == "__main__":
    main()
