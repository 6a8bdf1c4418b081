"""What our loop costs besides the training itself: one process against the shortest loop, and each feature's price.

    python bench/overhead.py                                  about three minutes on 2 cores
    mpirun -np 2 python bench/overhead.py                     the features alone

Both loops run in one process over the same tensors, with the same model and optimizer, without moving average,
augmentation or smoothing; before each of our steps, which train_epoch makes as in a run, the shortest loop makes one
of its own. Then all features are off, and one of them is switched on and off, from step to step. On a GPU a turn is of
20 steps, and the device is waited for in between.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from ours import Loop, our_loop
from pairs import Table, middle, ratio
from workload import BATCHES, WARMUP_STEPS, network, optimizer_of, tensors

from hvdtrain.checkpoint.save_points import NEVER, Decision, SavePoints
from hvdtrain.timing.phases import OFF, Phase, Phases, StepMeans, clock

GOAL = "<= 1.03"
NO_REPORTS = 10**9  # steps between two


class SwitchedSavePoints:
    """Asked for at every step, or not."""

    def __init__(self, real: SavePoints) -> None:
        self.on = True
        self._real = real

    def decide(self, step: int) -> Callable[[], Decision]:
        return (self._real if self.on else NEVER).decide(step)

    def saved(self) -> None:
        self._real.saved()


class SwitchedPhases:
    """A clock that runs, or not."""

    def __init__(self, real: Phases) -> None:
        self.on = False
        self._real = real

    def enter(self, phase: Phase) -> None:
        (self._real if self.on else OFF).enter(phase)

    def step_done(self) -> None:
        (self._real if self.on else OFF).step_done()

    def means(self) -> StepMeans | None:
        return self._real.means()

    def close(self) -> None:
        self._real.close()


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One that can be left out."""

    name: str
    switch: Callable[[bool], None]
    default: bool = True
    every_steps: int = 1  # it is paid for


class Turns:
    """Cuts our steps into blocks: what they take, and what is to be done before each."""

    def __init__(self, loop: Loop, between: Callable[[int], None]) -> None:
        self.spent_s: list[float] = []
        self._device = loop.step.device
        self.block = 20 if self._device.type == "cuda" else 1
        self._between = between
        self._steps = 0
        self._since = 0.0
        loop.watch.begins = self._begins
        loop.run()
        self._begins()
        self.spent_s = self.spent_s[WARMUP_STEPS:]

    def _begins(self) -> None:
        turn, inside = divmod(self._steps, self.block)
        self._steps += 1
        if inside:
            return
        if turn:
            self.spent_s.append((self.now() - self._since) / self.block)
        self._between(turn)
        self._since = self.now()

    def now(self) -> float:
        """The host's clock, once the device has done its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def shortest(model_name: str, batch: int, device: torch.device) -> Callable[[], None]:
    """The step of bench/peers/plain.py."""
    model = network(model_name).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_of(model)
    given = tensors(batch, device, rank=0)
    model.train()
    taken = 0

    def step() -> None:
        nonlocal taken
        images, labels = given[taken % BATCHES]
        taken += 1
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


