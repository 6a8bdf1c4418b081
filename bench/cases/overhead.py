"""The overhead of a step of ours compared with the training itself, in one process.

Before each of our steps in a run of hvdtrain, the shortest loop makes a step over the same tensors, with the same model
and optimizer. Then all features except one are off, and that one is toggled from step to step. On a GPU a turn has 20
steps, and the host waits for the device in between.
"""

import argparse
import contextlib
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvdtrain
from bench.jobs import job
from bench.pairs import Case, Table, middle
from bench.sides import WARMUP_STEPS, Given, Peer, optimizer_of, our_training, start
from hvdtrain.core import parts
from hvdtrain.core.finite import not_finite
from hvdtrain.core.layout import Statistics
from hvdtrain.loop.hooks import Hook
from hvdtrain.loop.save_points import NEVER
from hvdtrain.settings.safety import calls
from hvdtrain.settings.safety.watchdog import OFF
from hvdtrain.tasks.vision.settings import EffnetSettings

BLOCK = 20 if torch.cuda.is_available() else 1  # steps of a turn
UNRECORDED = contextlib.nullcontext()
OURS, AVERAGE, REPORTS = "ours, against the shortest loop", "moving average (EMA)", "reports"


def switches(training: hvdtrain.Training) -> dict[str, Callable[[bool], object]]:
    """Return a switch for each feature that can be toggled between steps; reports are made at every step or none."""
    step, loop = training.step, training._loop
    average, statistics, watchdog, points = step.average, step.statistics, loop.watchdog, loop.points
    record = calls.Calls.record
    none, finite = Statistics(nn.Linear(1, 1, device=step.device)), torch.zeros((), device=step.device)
    return {
        AVERAGE: lambda on: setattr(step, "average", average if on else None),
        "NaN agreement": lambda on: setattr(parts, "not_finite", not_finite if on else lambda *_: finite.clone()),
        "statistics guard": lambda on: setattr(step, "statistics", statistics if on else none),
        REPORTS: lambda on: setattr(loop.reports, "every_steps", 1 if on else 10**9),
        "watchdog": lambda on: setattr(loop, "watchdog", watchdog if on else OFF),
        "record of calls": lambda on: setattr(calls.Calls, "record", record if on else lambda *_, **__: UNRECORDED),
        "save points": lambda on: setattr(loop, "points", points if on else NEVER),
    }


class Turns(Hook):
    """Measures each epoch by turn: seconds of our steps, and the result of the epoch's function before the turn."""

    def __init__(self, device: torch.device) -> None:
        self.before: list[Callable[[int], float]] = []
        self.measured: list[list[tuple[float, float]]] = [[]]
        self._device, self._steps, self._theirs_s, self._since_s = device, 0, 0.0, 0.0

    def begin_step(self, number: int) -> None:
        if self._steps % BLOCK == 0:
            self._end_turn()
            self._theirs_s = self.before[len(self.measured) - 1](self._steps // BLOCK)
            self._since_s = now(self._device)
        self._steps += 1

    def epoch_trained(self, count: int) -> None:
        self._end_turn()
        self.measured.append([])
        self._steps = 0

    def _end_turn(self) -> None:
        if self._steps:
            self.measured[-1].append(((now(self._device) - self._since_s) / BLOCK, self._theirs_s))


def now(device: torch.device) -> float:
    """Return the seconds by the host's clock, after the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def is_on(turn: int) -> bool:
    """Once in every two turns, in a random order: with on off, off on a switch of nothing seemed to cost 1 %."""
    return (random.Random(turn // 2).random() < 0.5) == (turn % 2 == 0)  # noqa: S311


def rank(out: Path, *, pairs: int, **shared: Any) -> None:
    """Write what Turns has measured: two epochs against the shortest loop, then one for each feature."""
    given = Given(steps=BLOCK * (WARMUP_STEPS + 2 * pairs) - WARMUP_STEPS, **shared)

    def main(run: hvdtrain.Run[EffnetSettings]) -> None:
        turns, peer = Turns(run.device), Peer(given=given)
        training = our_training(run, given, turns)
        known, every_steps = switches(training), training._loop.reports.every_steps
        model = peer.network()
        shortest = peer.shortest_step(model, optimizer_of(model))

        def against_the_shortest(_: int, *, off: list[str]) -> float:
            for name in off:
                known[name](False)
            since_s = now(run.device)
            for _ in range(BLOCK):
                shortest()
            return (now(run.device) - since_s) / BLOCK

        def on_and_off(turn: int, *, feature: str) -> float:
            for name, switch in known.items():
                switch(name == feature and is_on(turn))
            return 0.0

        turns.before = [partial(against_the_shortest, off=off) for off in ([AVERAGE], list(known))]
        turns.before += [partial(on_and_off, feature=name) for name in known]
        for _ in training:
            pass
        names = [OURS, "the same without all that follows", *known]
        measured = dict(zip(names, turns.measured[: len(names)], strict=True))
        out.write_text(json.dumps({"measured": measured, "every_steps": every_steps}))

    start(given, ["--epochs", "9", "--ema-epochs", "2"], main)  # one for each of the names


def with_and_without(turns: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the seconds of steps with ours or a feature and without, pair by pair, after a warm-up."""
    if turns[0][1]:  # of the shortest loop
        return [ours_s for ours_s, _ in turns[WARMUP_STEPS:]], [theirs_s for _, theirs_s in turns[WARMUP_STEPS:]]
    states = [(is_on(turn), ours_s) for turn, (ours_s, _) in enumerate(turns)][WARMUP_STEPS:]
    return [ours_s for on, ours_s in states if on], [ours_s for on, ours_s in states if not on]


def overhead(chosen: argparse.Namespace) -> Table:
    """The overhead of our loop compared with the shortest one, and the cost of each feature; the goal is 3 %."""
    answer = job([], "cases.overhead:rank", model=chosen.model, batch=chosen.batch, pairs=chosen.pairs)
    table = Table(
        name="overhead",
        question=f"{chosen.model}, batch {chosen.batch}: a step of our loop (goal <= 1.03), and each feature's price:",
        columns=["what", "a step takes so many times as long", "ms per step"],
    )
    for what, turns in answer["measured"].items():
        every_steps = answer["every_steps"] if what == REPORTS else 1
        pairs = list(zip(*with_and_without(turns), strict=True))
        times = [1 + (one - other) / every_steps / other for one, other in pairs]
        prices_ms = [1000 * (one - other) / every_steps for one, other in pairs]
        table.add(what, middle(times), middle(prices_ms))
    return table


PAIRS = 6 if torch.cuda.is_available() else 100  # on a GPU a turn has many steps
CASES = {"overhead": Case(measure=overhead, options={"model": "efficientnet_b0", "batch": 16, "pairs": PAIRS})}
