"""What it costs to be ready for the worst: agreement and watchdog at every step, and checkpoints.

    mpirun -np 2 python bench/safety.py --pairs 500 --saves 20

A pair is a step with the agreement on what to do next and the watchdog's calls, and a step without, whichever is first
by turns. A save is followed by steps while it is being written; what they and the save take more than as many steps
before it is its whole cost. Rank 0 prints ratios, and the cost's share of the default interval between checkpoints.
"""

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path

from profile_overhead import interval
from synthetic import SyntheticTraining, synthetic_training

from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.save_points import NEVER, AgreedSavePoints, SavePoints
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.ranks.comm import Comm
from hvdtrain.record.tracker import Tracker
from hvdtrain.safety import watchdog as dogs
from hvdtrain.train.loop import Limits, measures_of, state_of
from hvdtrain.train.reports import Reports, host_gauges
from hvdtrain.train.task import Batch
from hvdtrain.vision.config import scaled

STEPS_PER_SAVE = 20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="efficientnet_tiny")
    arguments.add_argument("--batch", type=int, default=64, help="images per rank and step")
    arguments.add_argument("--pairs", type=int, default=200)
    arguments.add_argument("--saves", type=int, default=10)
    chosen = arguments.parse_args()

    training = synthetic_training(chosen.model, chosen.batch)
    comm, batch = training.step.comm, training.batch()
    if comm.rank == 0:
        print(f"{chosen.model}, batch {chosen.batch} per rank, {comm.size} ranks, {training.step.device.type}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(comm.allgather(name)[0])
        (folder / "ranks").mkdir(exist_ok=True)
        per_step(comm, training, batch, folder, pairs=chosen.pairs)
        per_save(comm, training, batch, folder, count=chosen.saves)
        comm.allgather("done")


def per_step(comm: Comm, training: SyntheticTraining, batch: Batch, folder: Path, *, pairs: int) -> None:
    """Print the time of a step with agreement and watchdog against one without."""
    watch = dogs.watch(folder, comm.rank, hang_timeout_s=None)
    agreed = AgreedSavePoints(comm, threading.Event(), every_s=scaled().checkpoint_every_s, every_steps=None)
    plain = comm.waiting
    numbers = itertools.count(1)

    def timed(ready: bool) -> float:
        comm.waiting = watch.collective if ready else plain
        spent = step(training, batch, next(numbers), agreed if ready else NEVER, watch if ready else dogs.OFF)
        watch.left(None)
        return spent

    for _ in range(6):
        timed(ready=True)
    ratios = []
    for number in range(pairs):
        order = [number % 2 == 0, number % 2 == 1]
        spent = {ready: timed(ready) for ready in order}
        ratios.append(spent[True] / spent[False])
    watch.close()
    comm.waiting = plain
    if comm.rank == 0:
        low, high = interval(ratios)
        print(
            f"a step with agreement and watchdog against one without: {statistics.median(ratios):.4f} "
            f"({low:.4f} to {high:.4f}), n = {pairs} pairs"
        )


def step(
    training: SyntheticTraining,
    batch: Batch,
    number: int,
    save_points: SavePoints,
    watch: dogs.Watchdog,
) -> float:
    """The seconds of one step."""
    started = time.perf_counter()
    watch.working(number)
    decided = save_points.decide(number)
    training.take(batch)
    decided()
    return time.perf_counter() - started


def per_save(comm: Comm, training: SyntheticTraining, batch: Batch, folder: Path, *, count: int) -> None:
    """Print what a checkpoint costs the training, as a share of the default interval."""
    device, measures = training.step.device, measures_of(training.task)
    tracker = Tracker(folder, writes=comm.rank == 0, measures=measures, result={})
    reports = Reports(comm, host_gauges(comm, device), training.task, every_steps=20, device=device)
    saves = Saves(
        state_of(training.step, Limits(max_skipped_steps=20, check_replicas_every=0), reports, seed=0),
        folder / "checkpoints",
        about={},
        memory=tracker.memory,
        guard=tracker.guard,
        keep=2,
        newest=None,
    )
    held_ms, cost_ms = [], []
    for number in range(1, count + 1):
        before = sum(step(training, batch, 0, NEVER, dogs.OFF) for _ in range(STEPS_PER_SAVE))
        started = time.perf_counter()
        saves.save(Position(step=number))
        held_ms.append(1000 * (time.perf_counter() - started))
        for _ in range(STEPS_PER_SAVE):
            step(training, batch, 0, NEVER, dogs.OFF)
        cost_ms.append(1000 * (time.perf_counter() - started - before))
        saves.wait(number)
    tracker.conclude("finished")
    if comm.rank == 0:
        size_mb = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("step-*/**/*.pt")) / 2e6
        every_ms = 1000 * scaled().checkpoint_every_s
        for name, spent in (
            ("holds the training for", held_ms),
            ("costs, writing beside the next steps included,", cost_ms),
        ):
            print(
                f"a checkpoint of {size_mb:.1f} MB {name} {statistics.median(spent):.0f} ms "
                f"({min(spent):.0f} to {max(spent):.0f}, n = {count}): {statistics.median(spent) / every_ms:.3%} of "
                f"{every_ms / 1000:.0f} s"
            )


if __name__ == "__main__":
    main()
