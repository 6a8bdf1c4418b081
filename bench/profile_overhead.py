"""What --profile costs: training steps with the clock on and off, in turns, on synthetic images.

    python bench/profile_overhead.py --model efficientnet_tiny --batch 16 --pairs 200
    mpirun -np 2 python bench/profile_overhead.py

A pair is a step with the clock and a step without it, whichever is first by turns, so that both see the same machine.
Rank 0 prints the median ratio with its 95 % interval, and the spread of the pairs. The file is not called profile.py,
which would stand in for Python's own module of that name.
"""

import argparse
import random
import statistics
import time
from typing import get_args

import torch
from synthetic import synthetic_training

from hvdtrain.timing.phases import OFF, Mode, Phases, clock

WARMUP_STEPS = 6


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="efficientnet_tiny")
    arguments.add_argument("--batch", type=int, default=16, help="images per rank and step")
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--mode", choices=get_args(Mode), default="on", help="off: what the measurement is worth")
    chosen = arguments.parse_args()

    training = synthetic_training(chosen.model, chosen.batch, ema_epochs=0.0)
    comm, device = training.step.comm, training.step.device

    def timed(phases: Phases) -> float:
        training.step.phases = phases
        started = time.perf_counter()
        phases.enter("read")
        training.take(training.batch(phases=phases))
        phases.enter("record")
        phases.step_done()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    measured = clock(chosen.mode, device)
    for _ in range(WARMUP_STEPS):
        timed(OFF)
    ratios = []
    for pair in range(chosen.pairs):
        if pair % 2:
            off_s, on_s = timed(OFF), timed(measured)
        else:
            on_s, off_s = timed(measured), timed(OFF)
        ratios.append(on_s / off_s)
    if comm.rank == 0:
        print(f"--profile={chosen.mode}, {chosen.model}, batch {chosen.batch}, {comm.size} ranks, {device.type}")
        print(report(ratios))


def report(ratios: list[float]) -> str:
    """The median of the pairs' ratios with a bootstrap interval, and their quartiles."""
    low, high = interval(ratios)
    quartiles = statistics.quantiles(ratios, n=4)
    return (
        f"time of a step with it against without: {statistics.median(ratios):.4f} "
        f"({low:.4f} to {high:.4f}), n = {len(ratios)} pairs; "
        f"half of them {quartiles[0]:.3f} to {quartiles[2]:.3f}"
    )


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by the bootstrap."""
    draw = random.Random(0)  # noqa: S311 (a bootstrap, no secret)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


if __name__ == "__main__":
    main()
