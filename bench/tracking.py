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

import torch
from synthetic import synthetic_training
from torch import Tensor

from hvdtrain.checkpoint.save_points import Asked
from hvdtrain.record.tracker import Tracker
from hvdtrain.train.reports import Window
from hvdtrain.train.training import Training
from hvdtrain.vision import images as data

Batches = Iterator[tuple[Tensor, Tensor]]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="efficientnet_b0")
    arguments.add_argument("--batch", type=int, default=32, help="images per rank and step")
    arguments.add_argument("--rounds", type=int, default=20)
    chosen = arguments.parse_args()

    training = synthetic_training(chosen.model, chosen.batch, ema_epochs=0.0)
    comm, device = training.step.comm, training.device
    pieces = list(data.pieces(torch.arange(8 * chosen.batch), chosen.batch))
    batches = itertools.cycle(list(training.images.train.batches(pieces, device)))
    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(Path(folder), writes=comm.rank == 0, result={})
        take(training, batches, None, 0)  # warm-up
        ratios, shares = [], []
        for number in range(chosen.rounds):
            order = [None, tracker] if number % 2 else [tracker, None]
            spent = {one is tracker: take(training, batches, one, number) for one in order}
            ratios.append(sum(spent[True]) / sum(spent[False]))
            shares.append(spent[True][1] / spent[False][0])
        tracker.conclude("finished")
    if comm.rank == 0:
        steps_ms = 1000 * spent[False][0] / training.config.report_every_steps
        print(f"{chosen.model}, batch {chosen.batch} per rank, {comm.size} ranks, {steps_ms:.1f} ms per step")
        show(f"a report every {training.config.report_every_steps} steps against none", ratios)
        show("the reports alone against the steps", shares)


def take(training: Training, batches: Batches, tracker: Tracker | None, number: int) -> tuple[float, float]:
    """The seconds of the steps between two reports, and of the report if there is one."""
    steps = training.config.report_every_steps
    window = Window()
    started = time.perf_counter()
    for at in range(1, steps + 1):
        raw, labels = next(batches)
        inputs = [(training.pictures.for_evaluation(raw), labels)]
        measure = tracker is not None and at == steps
        done = training.step(inputs, passes=1, global_count=training.global_batch, lr=0.01, measure=measure)
        window.visit(len(labels))
        window.add(loss=done.loss_sum, right=done.right, count=len(labels))
    stepped = time.perf_counter()
    if tracker is not None:
        step = (number + 1) * steps
        tracker.report(
            training.reports.share(
                window,
                step=step,
                lr=0.01,
                grad_norm=done.grad_norm,
                loss_scale=training.step.scaler.get_scale(),
                visited=0,
                asked=Asked(save=False, leave=False),
                end=None,
            )
        )
    return stepped - started, time.perf_counter() - stepped


def show(name: str, ratios: list[float]) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [math.nan, ratios[0], math.nan]
    print(
        f"{name:<42} {middle:.4f}  (quartiles {low:.4f} to {high:.4f}, {min(ratios):.4f} to {max(ratios):.4f}, "
        f"n = {len(ratios)})"
    )


if __name__ == "__main__":
    main()
