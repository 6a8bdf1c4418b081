"""Two passes over the same run in turns: A times steps as they are, B each phase in isolation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import variance

import torch

from hvdtrain.core.phases import COMPUTE, OFF, PHASES, Phase, Phases, StepMeans
from hvdtrain.profiling.clocks import WARMUP_STEPS, DeviceClock, HostClock

# Steps of one pass before the other has its turn; the first of them is not measured, since what is read ahead is then
# still to come. Nor are, of many loader workers, the first batches: they are all read in the time of one.
BLOCK_STEPS = 20
LAPS = 5  # of all workers, in a block


def make_clock(
    mode: str,
    device: torch.device,
    barrier: Callable[[], object],
    *,
    unmeasured_steps: int = WARMUP_STEPS,
    readers: int = 0,
) -> Phases:
    """The clock for a device; 'exact' takes every other step or so without asynchrony, which costs time.

    `barrier` returns when all ranks have called it. `readers` are the processes that read ahead for this rank.
    """
    is_gpu = device.type == "cuda"

    def make_overlapped_clock(unmeasured_steps: int) -> Phases:
        if is_gpu:
            return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), unmeasured_steps=unmeasured_steps)
        return HostClock(unmeasured_steps=unmeasured_steps)

    def make_isolated_clock(unmeasured_steps: int) -> Phases:
        wait = (lambda: torch.cuda.synchronize(device)) if is_gpu else None
        return HostClock(wait, barrier, unmeasured_steps=unmeasured_steps)

    if mode == "off":
        return OFF
    if mode == "on":
        return make_overlapped_clock(unmeasured_steps)
    return TwoPasses(make_overlapped_clock, make_isolated_clock, unmeasured_steps=unmeasured_steps, readers=readers)


def min_steps(unmeasured_steps: int) -> int:
    """How many steps it takes to measure something in both passes."""
    return unmeasured_steps + BLOCK_STEPS + 2


class TwoPasses:
    """Phases in blocks of steps, of pass A with an overlapped clock and of pass B with an isolated one.

    The turns are A B B A B A A B... (Thue and Morse), so that both passes see the same machine, and what recurs every
    some steps, as a report does, is in both.
    """

    def __init__(
        self,
        make_overlapped_clock: Callable[[int], Phases],
        make_isolated_clock: Callable[[int], Phases],
        *,
        unmeasured_steps: int,
        readers: int = 0,
    ) -> None:
        """Both functions make a clock that does not measure the given number of first steps."""
        self._block_steps = max(BLOCK_STEPS, LAPS * readers)
        self._unmeasured_steps = {False: max(1, readers), True: 1}  # by `isolated`, which reads nothing ahead
        self.isolated = False
        self.uniform_steps = unmeasured_steps
        self._make_clock = {False: make_overlapped_clock, True: make_isolated_clock}
        self._clock = OFF
        self._started_blocks = 0
        self._finished: dict[bool, list[StepMeans]] = {False: [], True: []}  # blocks, by `isolated`

    def enter(self, phase: Phase) -> None:
        self._clock.enter(phase)

    def end_step(self) -> None:
        self._clock.end_step()
        self.uniform_steps -= 1
        if not self.uniform_steps:
            self._finished = self._all_blocks()
            self.isolated = self._started_blocks.bit_count() % 2 == 1
            self.uniform_steps = self._block_steps
            self._clock = self._make_clock[self.isolated](self._unmeasured_steps[self.isolated])
            self._started_blocks += 1

    def means(self) -> StepMeans | None:
        finished = self._all_blocks()
        overlapped, isolated = finished[False], finished[True]
        if not isolated:
            return _merge_blocks(overlapped) if overlapped else None
        isolated_s, error_s = _merge_blocks(isolated).phases_s, _error_s(overlapped, isolated)
        return replace(_merge_blocks(overlapped), alone_s=isolated_s, error_s=error_s)

    def close(self) -> None:
        pass

    def _all_blocks(self) -> dict[bool, list[StepMeans]]:
        """The finished blocks and the steps so far of the current one."""
        means = self._clock.means()
        current = {self.isolated: [means] if means else []}
        return {isolated: [*blocks, *current.get(isolated, [])] for isolated, blocks in self._finished.items()}


def _merge_blocks(blocks: Sequence[StepMeans]) -> StepMeans:
    steps = sum(block.steps for block in blocks)
    return StepMeans(
        steps=steps,
        step_s=sum(block.steps * block.step_s for block in blocks) / steps,
        phases_s={phase: sum(block.steps * block.phases_s[phase] for block in blocks) / steps for phase in PHASES},
    )


def _error_s(overlapped: Sequence[StepMeans], isolated: Sequence[StepMeans]) -> float | None:
    """The standard error of the mean overlapped step less the mean isolated COMPUTE, from the spread over blocks."""
    if min(len(overlapped), len(isolated)) < 2:
        return None
    steps_s = [sum(block.phases_s.values()) for block in overlapped]
    compute_s = [sum(block.phases_s[phase] for phase in COMPUTE) for block in isolated]
    return math.sqrt(variance(steps_s) / len(steps_s) + variance(compute_s) / len(compute_s))
