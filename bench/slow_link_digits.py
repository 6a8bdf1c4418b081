"""One rank that learns the digits with a prototype of bench/sync/: the loop of hvdtrain, with its own sum taken out.

    mpirun -np 2 python bench/slow_link_digits.py OUT --sync "local 16" --folds 0 1 2 --until 0.97

OUT gets for each fold the test accuracy after each epoch, and the seconds of training until then.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy_at_scale import FOLDS, digits_in_folds, loop_over
from mpi4py import MPI
from sync import FLAT
from sync.delayed import Delayed
from sync.flat import Flat, Half
from sync.groups import Groups, Sync, groups_of
from sync.local import Local
from sync.local_overlapped import LocalOverlapped
from sync.power_sgd import PowerSGD
from sync.top_k import TopK
from two_hosts import ADDRESSES

from hvdtrain.core.position import Position
from hvdtrain.ranks.comm import Comm, HorovodComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.safety.memory import keep_freed_memory
from hvdtrain.vision.images import Images
from hvdtrain.vision.settings import EffnetSettings, scaled

Make = Callable[[Groups, torch.optim.Optimizer], Sync]


def syncs(steps_per_epoch: int) -> dict[str, Make]:
    """By the names that the tables have."""
    local = partial(partial, Local)
    return {
        FLAT: Flat,
        "fp16": Half,
        "delayed": Delayed,
        "top-k 1 %": partial(TopK, share=0.01),
        **{f"PowerSGD {rank}": partial(PowerSGD, rank=rank) for rank in (1, 2, 4)},
        **{f"local {every}": local(every=every) for every in (4, 8, 16)},
        "local 16, parameters alone": local(every=16, momenta=False),
        "local 16, overlapped": partial(LocalOverlapped, every=16),
        "local 16 after epoch 2": local(every=16, flat_steps=2 * steps_per_epoch),
        "local 16 after epoch 5": local(every=16, flat_steps=5 * steps_per_epoch),
        "local 16, outer momentum 0.3": local(every=16, outer_momentum=0.3),
        "local 16, outer momentum 0.6": local(every=16, outer_momentum=0.6),
    }


class Unsynced(HorovodComm):
    """Ranks whose gradients somebody else sums."""

    def gradient_sync(self, *_: Any, **__: Any) -> GradientSync:
        return GradientSync()


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("out", type=Path)
    words.add_argument("--sync", required=True)
    words.add_argument("--folds", type=int, nargs="+", default=range(FOLDS))
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--epochs", type=int, default=10)
    words.add_argument("--batch", type=int, default=16, help="images per rank")
    words.add_argument("--until", type=float, default=2.0, help="leave at this accuracy")
    chosen = words.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    comm = Unsynced(MPI.COMM_WORLD)
    comm.start()
    config = dataclasses.replace(
        scaled(),
        data="digits",
        model="efficientnet_tiny",
        epochs=chosen.epochs,
        batch_size_per_rank=chosen.batch,
        seed=chosen.seed,
    )
    folds = digits_in_folds()
    found = {fold: learn(comm, config, folds[fold], chosen.sync, until=chosen.until) for fold in chosen.folds}
    if comm.rank == 0:
        chosen.out.write_text(json.dumps(found))


def learn(comm: Comm, config: EffnetSettings, split: Images, name: str, *, until: float) -> dict[str, list[float]]:
    """Accuracy (0 to 1) after each epoch, and the seconds of training and of making ranks equal until then."""
    loop = loop_over(comm, config, split)
    steps_per_epoch = loop.feed.sizes.steps_per_epoch
    loop.reports.every_steps = steps_per_epoch
    sync = syncs(steps_per_epoch)[name](groups_of(len(ADDRESSES)), loop.step.optimizer)
    sync.attach()
    accuracies: list[float] = []
    seconds = [0.0]
    for epoch in range(config.epochs):
        started = time.perf_counter()
        start = Position(step=epoch * steps_per_epoch, epoch=epoch)
        for _ in loop.steps(start):
            pass
        sync.settle()
        if sync.parts_hosts:  # the average of their moving averages is that of their average
            comm.data.average_(loop.step.evaluated.state_dict().values())
        seconds.append(seconds[-1] + time.perf_counter() - started)
        accuracies.append(loop.evaluate(start)["accuracy"])
        if accuracies[-1] >= until:
            break
    return {"accuracy": accuracies, "train_s": seconds[1:]}


if __name__ == "__main__":
    main()
