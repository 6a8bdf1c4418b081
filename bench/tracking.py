"""What a report to TensorBoard and metrics.jsonl costs at the default interval.

    mpirun -np 2 python bench/tracking.py --rounds 20

Every round takes as many steps as lie between two reports twice, once with a report after them and once without, in
turns first: a ratio compares neighbours in time. Rank 0 prints the median ratio with its quartiles and its extremes,
and the time of the reports alone against that of the steps.
"""

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from synthetic import SyntheticTraining, synthetic_training

from hvdtrain.checkpoint.save_points import Decision
from hvdtrain.record.tracker import Tracker
from hvdtrain.train.loop import measures_of
from hvdtrain.train.reports import Reports, Window, host_gauges
from hvdtrain.train.task import Batch

Batches = Iterator[Batch]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="efficientnet_b0")
    arguments.add_argument("--batch", type=int, default=32, help="images per rank and step")
    arguments.add_argument("--rounds", type=int, default=20)
    chosen = arguments.parse_args()

    training = synthetic_training(chosen.model, chosen.batch, ema_epochs=0.0)
    comm, every_steps = training.step.comm, training.config.report_every_steps
    device = training.step.device
    reports = Reports(comm, host_gauges(comm, device), training.task, every_steps=every_steps, device=device)
    batches = itertools.cycle([training.batch(number) for number in range(8)])
    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(Path(folder), writes=comm.rank == 0, measures=measures_of(training.task), result={})
        take(training, reports, batches, None, 0)  # warm-up
        ratios, shares = [], []
        for number in range(chosen.rounds):
            order = [None, tracker] if number % 2 else [tracker, None]
            spent = {writes is tracker: take(training, reports, batches, writes, number) for writes in order}
            ratios.append(sum(spent[True]) / sum(spent[False]))
            shares.append(spent[True][1] / spent[False][0])
        tracker.conclude("finished")
    if comm.rank == 0:
        steps_ms = 1000 * spent[False][0] / every_steps
        print(f"{chosen.model}, batch {chosen.batch} per rank, {comm.size} ranks, {steps_ms:.1f} ms per step")
        show(f"a report every {every_steps} steps against none", ratios)
        show("the reports alone against the steps", shares)


def take(
    training: SyntheticTraining, reports: Reports, batches: Batches, tracker: Tracker | None, number: int
) -> tuple[float, float]:
    """The seconds of the steps between two reports, and of the report if there is one."""
    steps, window = reports.every_steps, Window()
    started = time.perf_counter()
    for at in range(1, steps + 1):
        done = training.take(next(batches), measure=tracker is not None and at == steps)
        window.add(at, done, count=training.sizes.micro_batch)
    stepped = time.perf_counter()
    if tracker is not None:
        report = reports.report(
            window,
            step=(number + 1) * steps,
            lr=0.01,
            grad_norm=done.grad_norm,
            loss_scale=training.step.scaler.get_scale(),
            visited=0,
            decision=Decision(save=False, leave=False),
            end=None,
        )
        tracker.count(report.step, report.counts())
        if tracker.writes:
            tracker.report(report.scalars(), happened=report.events())
    return stepped - started, time.perf_counter() - stepped


def show(name: str, ratios: list[float]) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [math.nan, ratios[0], math.nan]
    print(
        f"{name:<42} {middle:.4f}  (quartiles {low:.4f} to {high:.4f}, {min(ratios):.4f} to {max(ratios):.4f}, "
        f"n = {len(ratios)})"
    )


if __name__ == "__main__":
    main()
