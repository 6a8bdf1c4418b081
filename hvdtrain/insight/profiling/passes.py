"""Two alternating passes over the same run: A times normal steps, B each phase in isolation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import variance

import torch

from hvdtrain.core.phases import COMPUTE, OFF, PHASES, Phase, Phases, StepMeans
from hvdtrain.insight.profiling.clocks import WARMUP_STEPS, DeviceClock, HostClock

# Number of steps before the passes alternate. The first step is not measured, because prefetching has to start again.
# With many loader workers their first batches are not measured either: they are all read in the time of one.
BLOCK_STEPS = 20
LAPS = 5  # rounds of all workers in a block


def make_clock(
    mode: str,
    device: torch.device,
    barrier: Callable[[], object],
    *,
    unmeasured_steps: int = WARMUP_STEPS,
    readers: int = 0,
) -> Phases:
    """Return the clock for a device; 'exact' runs about every other step without overlap, which costs time.

    `barrier` returns when all ranks have called it. `readers` is the largest number of processes that prefetch for a
    rank: ranks must alternate at the same steps.
    """
    make_overlapped: Callable[..., Phases] = HostClock
    make_isolated = partial(HostClock, None, barrier)
    if device.type == "cuda":
        make_overlapped = partial(DeviceClock, partial(torch.cuda.Event, enable_timing=True))
        make_isolated = partial(HostClock, partial(torch.cuda.synchronize, device), barrier)
    if mode in ("off", "timeline"):
        return OFF
    if mode == "on":
        return make_overlapped(unmeasured_steps=unmeasured_steps)
    return TwoPasses(make_overlapped, make_isolated, unmeasured_steps=unmeasured_steps, readers=readers)


def min_steps(unmeasured_steps: int, readers: int) -> int:
    """Return the minimum number of steps to measure something in both passes."""
    return unmeasured_steps + _block_steps(readers) + 2


def _block_steps(readers: int) -> int:
    return max(BLOCK_STEPS, LAPS * readers)


class TwoPasses(Phases):
    """Alternates blocks of steps: pass A with an overlapped clock, pass B with an isolated one.

    The order is A B B A B A A B... (Thue and Morse), so that both passes run under the same conditions, and periodic
    work, such as reports, occurs in both.
    """

    isolated = False
    uniform_steps = 0

    def __init__(
        self,
        make_overlapped: Callable[..., Phases],
        make_isolated: Callable[..., Phases],
        *,
        unmeasured_steps: int,
        readers: int = 0,
    ) -> None:
        """Alternate between two kinds of clocks; each function takes `unmeasured_steps`, the first ones."""
        self._block_steps = _block_steps(readers)
        self._unmeasured_steps = {False: max(1, readers), True: 1}  # by `isolated`, which prefetches nothing
        self.uniform_steps = unmeasured_steps
        self._make_clock = {False: make_overlapped, True: make_isolated}
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
            make = self._make_clock[self.isolated]
            self._clock = make(unmeasured_steps=self._unmeasured_steps[self.isolated])
            self._started_blocks += 1

    def means(self) -> StepMeans | None:
        finished = self._all_blocks()
        overlapped, isolated = finished[False], finished[True]
        if not isolated:
            return _merge_blocks(overlapped) if overlapped else None
        isolated_s, error_s = _merge_blocks(isolated).phases_s, _error_s(overlapped, isolated)
        return replace(_merge_blocks(overlapped), alone_s=isolated_s, error_s=error_s)

    def _all_blocks(self) -> dict[bool, list[StepMeans]]:
        """Return the finished blocks and the steps so far of the current one."""
        means = self._clock.means()
        current = {self.isolated: [means] if means else []}
        return {isolated: [*blocks, *current.get(isolated, [])] for isolated, blocks in self._finished.items()}


def _merge_blocks(blocks: Sequence[StepMeans]) -> StepMeans:
    steps = sum(block.steps for block in blocks)
    return StepMeans(
        steps=steps,
        step_s=sum(block.steps * block.step_s for block in blocks) / steps,
        phases_s={phase: sum(block.steps * block.phases_s[phase] for block in blocks) / steps for phase in PHASES},
        queued_s=sum(block.steps * block.queued_s for block in blocks) / steps,
    )


def _error_s(overlapped: Sequence[StepMeans], isolated: Sequence[StepMeans]) -> float | None:
    """Return the standard error of the overlapped step minus the isolated COMPUTE, from the spread over blocks."""
    if min(len(overlapped), len(isolated)) < 2:
        return None
    steps_s = [sum(block.phases_s.values()) for block in overlapped]
    compute_s = [sum(block.phases_s[phase] for phase in COMPUTE) for block in isolated]
    return math.sqrt(variance(steps_s) / len(steps_s) + variance(compute_s) / len(compute_s))
