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
from accuracy_at_scale import FOLDS, digits_in_folds
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

from hvdtrain import effnet
from hvdtrain.checkpoint.position import Position
from hvdtrain.core.feed import Feed
from hvdtrain.core.loop import Limits, evaluate, train_epoch
from hvdtrain.core.reports import Reports
from hvdtrain.ranks.comm import Comm, HorovodComm
from hvdtrain.ranks.memory import keep_freed_memory
from hvdtrain.ranks.sync import GradientSync, NoSync
from hvdtrain.recipe.schedule import learning_rate
from hvdtrain.tracking.gauges import Gauges, none
from hvdtrain.vision import models
from hvdtrain.vision.config import EffnetConfig, scaled
from hvdtrain.vision.images import Images
from hvdtrain.vision.task import image_task

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
        return NoSync()


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


def learn(comm: Comm, config: EffnetConfig, split: Images, name: str, *, until: float) -> dict[str, list[float]]:
    """Accuracy (0 to 1) after each epoch, and the seconds of training and of making ranks equal until then."""
    cpu = torch.device("cpu")
    sizes = effnet.cut(comm, config, split)
    task = image_task(config, split, cpu)
    lr = learning_rate(config, samples=len(split.train), steps_per_epoch=sizes.steps_per_epoch)
    torch.manual_seed(config.seed)
    model = models.build(config.model, classes=10)
    step = effnet.step_for(comm, config, model, task, cpu, lr=lr.peak, sizes=sizes)
    sync = syncs(sizes.steps_per_epoch)[name](groups_of(len(ADDRESSES)), step.optimizer)
    sync.attach()
    feed = Feed(split.train, task, comm, sizes, seed=config.seed, device=cpu)
    limits = Limits(max_skipped_steps=config.max_skipped_steps, check_replicas_every=0)
    reports = Reports(comm, Gauges(none), task, every_steps=sizes.steps_per_epoch, device=cpu)
    torch.manual_seed((config.seed << 16) + comm.rank)
    accuracies: list[float] = []
    seconds = [0.0]
    for epoch in range(config.epochs):
        started = time.perf_counter()
        start = Position(step=epoch * sizes.steps_per_epoch, epoch=epoch)
        for _ in train_epoch(step, feed, start, lr=lr, limits=limits, reports=reports):
            pass
        sync.settle()
        if sync.parts_hosts:  # the average of their moving averages is that of their average
            comm.data.average_(step.evaluated.state_dict().values())
        seconds.append(seconds[-1] + time.perf_counter() - started)
        metrics = evaluate(step, split.test, start.step, micro_batch=sizes.micro_batch)
        assert metrics is not None
        accuracies.append(metrics["accuracy"])
        if accuracies[-1] >= until:
            break
    return {"accuracy": accuracies, "train_s": seconds[1:]}


if __name__ == "__main__":
    main()
