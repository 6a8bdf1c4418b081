"""Two passes over the same run in turns: A times steps as they are, B each phase alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import variance
from typing import Literal

import torch

from hvdtrain.profiling.phases import (
    COMPUTE,
    OFF,
    PHASES,
    WARMUP_STEPS,
    DeviceClock,
    HostClock,
    Phase,
    Phases,
    StepMeans,
)

Mode = Literal["off", "on", "exact"]

# Steps of one pass before the other has its turn; the first of them is not measured, since what is read ahead is then
# still to come. Nor are, of many loader workers, the first batches: they are all read in the time of one.
BLOCK_STEPS = 20
LAPS = 5  # of all workers, in a block


def clock(
    mode: Mode,
    device: torch.device,
    meet: Callable[[], object],
    *,
    unmeasured_steps: int = WARMUP_STEPS,
    readers: int = 0,
) -> Phases:
    """The clock for a device; 'exact' takes every other step or so without asynchrony, which costs time.

    `meet` returns when all ranks have called it. `readers` are the processes that read ahead for this rank.
    """
    is_gpu = device.type == "cuda"

    def whole(unmeasured_steps: int) -> Phases:
        if is_gpu:
            return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), unmeasured_steps=unmeasured_steps)
        return HostClock(unmeasured_steps=unmeasured_steps)

    def alone(unmeasured_steps: int) -> Phases:
        wait = (lambda: torch.cuda.synchronize(device)) if is_gpu else None
        return HostClock(wait, meet, unmeasured_steps=unmeasured_steps)

    if mode == "off":
        return OFF
    if mode == "on":
        return whole(unmeasured_steps)
    return TwoPasses(whole, alone, unmeasured_steps=unmeasured_steps, readers=readers)


def least_steps(unmeasured_steps: int) -> int:
    """How many steps it takes to measure something in both passes."""
    return unmeasured_steps + BLOCK_STEPS + 2


class TwoPasses:
    """Phases in blocks of steps, of pass A with `whole`'s clock and of pass B with `alone`'s.

    The turns are A B B A B A A B... (Thue and Morse), so that both passes see the same machine, and what recurs every
    some steps, as a report does, is in both.
    """

    def __init__(
        self,
        whole: Callable[[int], Phases],
        alone: Callable[[int], Phases],
        *,
        unmeasured_steps: int,
        readers: int = 0,
    ) -> None:
        """Both make a clock that leaves out so many of its first steps."""
        self._block_steps = max(BLOCK_STEPS, LAPS * readers)
        self._left_out = {False: max(1, readers), True: 1}  # by `alone`, which reads nothing ahead
        self.alone = False
        self.steps_alike = unmeasured_steps
        self._new_clock = {False: whole, True: alone}
        self._clock = OFF
        self._blocks = 0  # begun
        self._done: dict[bool, list[StepMeans]] = {False: [], True: []}  # of whole blocks, by `alone`

    def enter(self, phase: Phase) -> None:
        self._clock.enter(phase)

    def step_done(self) -> None:
        self._clock.step_done()
        self.steps_alike -= 1
        if not self.steps_alike:
            self._done = self._with_clock()
            self.alone = self._blocks.bit_count() % 2 == 1
            self.steps_alike = self._block_steps
            self._clock = self._new_clock[self.alone](self._left_out[self.alone])
            self._blocks += 1

    def means(self) -> StepMeans | None:
        done = self._with_clock()
        whole, alone = done[False], done[True]
        if not alone:
            return _together(whole) if whole else None
        return replace(_together(whole), alone_s=_together(alone).phases_s, error_s=_error_s(whole, alone))

    def close(self) -> None:
        pass

    def _with_clock(self) -> dict[bool, list[StepMeans]]:
        """The blocks that are done, and what is done of the one at hand."""
        means = self._clock.means()
        more = {self.alone: [means] if means else []}
        return {alone: [*done, *more.get(alone, [])] for alone, done in self._done.items()}


def _together(blocks: Sequence[StepMeans]) -> StepMeans:
    steps = sum(block.steps for block in blocks)
    return StepMeans(
        steps=steps,
        step_s=sum(block.steps * block.step_s for block in blocks) / steps,
        phases_s={phase: sum(block.steps * block.phases_s[phase] for block in blocks) / steps for phase in PHASES},
    )


def _error_s(whole: Sequence[StepMeans], alone: Sequence[StepMeans]) -> float | None:
    """The standard error of the mean step of `whole` less the mean of COMPUTE `alone`, from the spread over blocks."""
    if min(len(whole), len(alone)) < 2:
        return None
    steps_s = [sum(block.phases_s.values()) for block in whole]
    compute_s = [sum(block.phases_s[phase] for phase in COMPUTE) for block in alone]
    return math.sqrt(variance(steps_s) / len(steps_s) + variance(compute_s) / len(compute_s))
