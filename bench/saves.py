"""What checkpoints cost the training.

    mpirun -np 2 python bench/saves.py --saves 20

A save is followed by steps while it is being written; what they and the save take more than as many steps before it is
its whole cost. Rank 0 prints both, and their share of the default interval between checkpoints.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from synthetic import SyntheticTraining, synthetic_training

from hvdtrain.checkpoint.saves import Saves
from hvdtrain.core.position import Position
from hvdtrain.core.task import Batch
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.reports import Reports
from hvdtrain.program import assembly
from hvdtrain.ranks.comm import Comm
from hvdtrain.tracking.gauges import open_gauges
from hvdtrain.tracking.tracker import Tracker
from hvdtrain.vision.settings import scaled

STEPS_PER_SAVE = 20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="efficientnet_tiny")
    arguments.add_argument("--batch", type=int, default=64, help="images per rank and step")
    arguments.add_argument("--saves", type=int, default=10)
    chosen = arguments.parse_args()

    training = synthetic_training(chosen.model, chosen.batch)
    comm, batch = training.step.slots.comm, training.batch()
    if comm.rank == 0:
        print(f"{chosen.model}, batch {chosen.batch} per rank, {comm.size} ranks, {training.step.device.type}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(comm.allgather(name)[0])
        (folder / "ranks").mkdir(exist_ok=True)
        per_save(comm, training, batch, folder, count=chosen.saves)
        comm.allgather("done")


def steps_s(training: SyntheticTraining, batch: Batch) -> float:
    """The seconds of some steps."""
    started = time.perf_counter()
    for _ in range(STEPS_PER_SAVE):
        training.take(batch)
    return time.perf_counter() - started


def per_save(comm: Comm, training: SyntheticTraining, batch: Batch, folder: Path, *, count: int) -> None:
    """Print what a checkpoint costs the training, as a share of the default interval."""
    step, measures = training.step, assembly.measures_of(training.task)
    tracker = Tracker(folder, is_writer=comm.rank == 0, measures=measures, result={})
    reports = Reports(
        comm,
        lambda known: open_gauges(comm, step.device, known),
        training.task,
        every_steps=20,
        device=step.device,
    )
    limits = Limits(step, max_skipped_steps=20, check_replicas_every=0)
    saves = Saves(
        assembly.state_of(step, limits, reports, seed=0),
        folder / "checkpoints",
        about={},
        memory=tracker.memory,
        guard=tracker.guard,
        keep=2,
        newest=None,
    )
    held_ms, cost_ms = [], []
    for number in range(1, count + 1):
        before_s = steps_s(training, batch)
        started = time.perf_counter()
        saves.save(Position(step=number))
        held_ms.append(1000 * (time.perf_counter() - started))
        steps_s(training, batch)
        cost_ms.append(1000 * (time.perf_counter() - started - before_s))
        saves.wait(number)
    tracker.conclude("finished")
    if comm.rank == 0:
        size_mb = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("step-*/**/*.pt")) / 2e6
        every_ms = 1000 * float(scaled().checkpoint_every_s)
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
