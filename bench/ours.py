"""Our loop over the tensors that its peers are given: train_epoch with all that a run has around it.

    mpirun -np 2 python bench/ours.py OUT --model efficientnet_b0 --batch 16 --steps 20 --set fusion_threshold_mb=8

Recipe `scaled` but for what the peers lack: no moving average, smoothing or augmentation. Agreement, guards, watchdog,
reports and their files stay on. Settings of `--set` come last, those of hvdtrain.effnet by their names in Python.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workload import CLASSES, LR, WARMUP_STEPS, StepClock, answer, asked, fast_kernels, network, tensors

from hvdtrain import effnet
from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.save_points import AgreedSavePoints, SavePoints
from hvdtrain.core.feed import Feed, Resident
from hvdtrain.core.loop import Limits, measures_of, train_epoch
from hvdtrain.core.reports import Reports, host_gauges
from hvdtrain.core.step import TrainingStep
from hvdtrain.core.task import Batch
from hvdtrain.profiling.phases import OFF, Phases
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.device import choose_device, share_cores
from hvdtrain.recipe.schedule import LearningRate, learning_rate
from hvdtrain.safety.watchdog import RankWatchdog
from hvdtrain.settings.join import horovod_fusion_mb
from hvdtrain.tracking.tracker import Tracker
from hvdtrain.vision.augment import Augmentations
from hvdtrain.vision.config import EffnetConfig, scaled
from hvdtrain.vision.images import Images
from hvdtrain.vision.task import ImageTask, image_task

PLAIN: dict[str, Any] = {
    "compression": "none",
    "augment": False,
    "label_smoothing": 0.0,
    "ema_epochs": 0.0,
    "lr": LR,
    "epochs": 1,
}


class Given:
    """A split whose batches are ready, the same few in turns."""

    reads_files = False

    def __init__(self, batches: list[Batch], count: int) -> None:
        """`count` samples, as the loop believes."""
        self._batches = batches
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        for number, _ in enumerate(indices):
            phases.enter("read")
            yield self._batches[number % len(self._batches)]


class GivenTask(ImageTask):
    """Images that need no preparing."""

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        return raw


class Watch(RankWatchdog):
    """A run's watchdog, which a bench can leave out, and which tells it of each step."""

    on = True
    begins: Callable[[], object] = staticmethod(lambda: None)

    def working(self, step: int) -> None:
        self.begins()
        if self.on:
            super().working(step)


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One rank's epoch, ready to run."""

    config: EffnetConfig
    step: TrainingStep
    feed: Feed
    lr: LearningRate
    reports: Reports
    save_points: SavePoints
    watch: Watch
    tracker: Tracker

    def run(self) -> None:
        """All steps, their reports written as in a run."""
        coming = train_epoch(
            self.step,
            self.feed,
            Position(),
            lr=self.lr,
            limits=Limits(max_skipped_steps=self.config.max_skipped_steps, check_replicas_every=0),
            reports=self.reports,
            save_points=self.save_points,
            watchdog=self.watch,
        )
        for report in coming:
            self.tracker.count(report.step, report.counts())
            if self.tracker.writes:
                self.tracker.report(report.scalars(), happened=report.events())
            if report.skipped:
                sys.exit(f"steps that were not finite are no measure: {report.skipped}")


def given(batch: int, samples: int, device: torch.device, rank: int) -> tuple[Images, ImageTask]:
    """What the peers get, as data and task of a run."""
    batches: list[Batch] = [{"images": images, "labels": labels} for images, labels in tensors(batch, device, rank)]
    split = Given(batches, samples)
    zero, one = (0.0,) * 3, (1.0,) * 3
    images = Images(train=split, test=split, classes=CLASSES, height=32, mean=zero, std=one, mirror=True)
    return images, GivenTask(images, Augmentations(), seed=0, device=device)


def read(config: EffnetConfig, whole: Images, samples: int, device: torch.device) -> tuple[Images, ImageTask]:
    """The first samples of a split on the device, read and augmented as in a run."""
    assert isinstance(whole.train, Resident)
    first = Resident(**{name: tensor[:samples] for name, tensor in whole.train.tensors.items()})
    images = dataclasses.replace(whole, train=first)
    return images, image_task(config, images, device)


@contextlib.contextmanager
def our_loop(
    model: str, batch: int, *, steps: int, phases: Phases = OFF, whole: Images | None = None, **settings: Any
) -> Iterator[Loop]:
    """So many steps on all ranks, each over `batch` samples per rank: the given ones, or the first of a whole split."""
    config = dataclasses.replace(scaled(), data="synthetic", **{**PLAIN, "model": model, **settings})
    config = dataclasses.replace(config, batch_size_per_rank=batch)
    comm = connect(fusion_threshold_mb=horovod_fusion_mb(config), cycle_time_ms=config.cycle_time_ms)
    share_cores(comm)
    device = choose_device(comm)
    samples = steps * batch * config.accumulate_steps * comm.size
    images, task = given(batch, samples, device, comm.rank) if whole is None else read(config, whole, samples, device)
    sizes = effnet.cut(comm, config, images)
    assert (sizes.micro_batch, sizes.steps_per_epoch) == (batch, steps)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.allgather(own)[0])
        (folder / "ranks").mkdir(exist_ok=True)
        comm.allgather("made")
        watch = Watch(folder / "ranks", comm.rank, hang_timeout_s=None)
        comm.waiting = watch.collective
        comm.start()
        lr = learning_rate(config, samples=samples, steps_per_epoch=steps)
        step = effnet.step_for(comm, config, network(model), task, device, lr=lr.peak, sizes=sizes, phases=phases)
        tracker = Tracker(folder, writes=comm.rank == 0, measures=measures_of(task), result={})
        yield Loop(
            config=config,
            step=step,
            feed=Feed(images.train, task, comm, sizes, seed=0, device=device, phases=phases),
            lr=lr,
            reports=Reports(
                comm, host_gauges(comm, device), task, every_steps=config.report_every_steps, device=device
            ),
            save_points=AgreedSavePoints(comm, threading.Event(), every_s=config.checkpoint_every_s, every_steps=None),
            watch=watch,
            tracker=tracker,
        )
        tracker.conclude("finished")
        comm.allgather("done")  # nobody's folder goes before
        watch.close()


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """By name, from NAME=VALUE: a value is JSON, or else text."""
    settings: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words):
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def main() -> None:
    chosen = asked()
    fast_kernels()
    shared = {"precision": chosen.precision, "compile": chosen.compile}
    steps = WARMUP_STEPS + chosen.steps
    with our_loop(chosen.model, chosen.batch, steps=steps, **shared, **settings_of(chosen.set)) as loop:
        clock = StepClock(loop.step.device)
        loop.watch.begins = clock.mark
        loop.run()
        clock.mark()
        if loop.step.comm.rank == 0:
            answer(chosen.out, clock, loop.step.device)


if __name__ == "__main__":
    main()
