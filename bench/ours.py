"""Our loop over the tensors that its peers are given, with all that a run has around it.

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
from jobs import job_of, ranks_of, step_of
from torch import Tensor
from workload import CLASSES, LR, WARMUP_STEPS, StepClock, answer, asked, fast_kernels, network, tensors

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.position import Position
from hvdtrain.core.task import Batch
from hvdtrain.feed.feed import Feed, Resident
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.loop import Loop
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Reports
from hvdtrain.loop.save_points import AgreedSavePoints
from hvdtrain.program import assembly
from hvdtrain.program.join import with_reducer
from hvdtrain.ranks.device import choose_device
from hvdtrain.safety.watchdog import RankWatchdog
from hvdtrain.tracking.gauges import open_gauges
from hvdtrain.tracking.tracker import Tracker
from hvdtrain.vision.augment import Augmentations
from hvdtrain.vision.images import Images
from hvdtrain.vision.settings import EffnetSettings, scaled
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

    reads_files, readers = False, 0
    content: str | None = None

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

    def begin_step(self, step: int) -> None:
        self.begins()
        if self.on:
            super().begin_step(step)


@dataclasses.dataclass(kw_only=True)
class Epoch(Loop):
    """One rank's, ready to run."""

    config: EffnetSettings
    watch: Watch
    tracker: Tracker

    def run(self) -> None:
        """All steps, their reports written as in a run."""
        for report in self.steps(Position()):
            self.tracker.add_counts(report.step, report.counts())
            if self.tracker.is_writer:
                self.tracker.report(report.scalars(), event_lines=report.events())
            if report.skipped:
                sys.exit(f"steps that were not finite are no measure: {report.skipped}")


def given(
    batch: int, samples: int, device: torch.device, rank: int, memory_format: torch.memory_format
) -> tuple[Images, ImageTask]:
    """What the peers get, as data and task of a run."""
    batches: list[Batch] = [{"images": images, "labels": labels} for images, labels in tensors(batch, device, rank)]
    split = Given(batches, samples)
    zero, one = (0.0,) * 3, (1.0,) * 3
    images = Images(train=split, test=split, classes=CLASSES, height=32, mean=zero, std=one, is_mirrorable=True)
    return images, GivenTask(images, Augmentations(), seed=0, device=device, memory_format=memory_format)


def read(config: EffnetSettings, whole: Images, samples: int, device: torch.device) -> tuple[Images, ImageTask]:
    """The first samples of a split on the device, read and augmented as in a run."""
    assert isinstance(whole.train, Resident)
    first = Resident(**{name: tensor[:samples] for name, tensor in whole.train.tensors.items()})
    images = dataclasses.replace(whole, train=first)
    return images, image_task(config, images, device)


@contextlib.contextmanager
def our_loop(
    model: str, batch: int, *, steps: int, phases: Phases = OFF, whole: Images | None = None, **settings: Any
) -> Iterator[Epoch]:
    """So many steps on all ranks, each over `batch` samples per rank: the given ones, or the first of a whole split."""
    config = dataclasses.replace(scaled(), data="synthetic", **{**PLAIN, "model": model, **settings})
    config, _ = with_reducer(dataclasses.replace(config, batch_size_per_rank=batch))
    comm = ranks_of(config)
    device = choose_device(comm)
    samples = steps * batch * config.accumulate_steps * comm.size
    if whole is None:
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        images, task = given(batch, samples, device, comm.rank, memory_format)
    else:
        images, task = read(config, whole, samples, device)
    job = job_of(comm, config, device, model=network(model), task=task, train=images.train, phases=phases)
    assert (job.sizes.micro_batch, job.sizes.steps_per_epoch) == (batch, steps)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.allgather(own)[0])
        (folder / "ranks").mkdir(exist_ok=True)
        comm.allgather("made")
        watch = Watch(folder / "ranks", comm.rank, hang_timeout_s=None)
        comm.wait_context = watch.collective
        comm.start()
        rate = assembly.rate_of(config, job)
        step = step_of(config, job, lr=rate.peak)
        tracker = Tracker(folder, is_writer=comm.rank == 0, measures=assembly.measures_of(task), result={})
        yield Epoch(
            config=config,
            step=step,
            feed=Feed(images.train, task, comm, job.sizes, seed=0, device=device, phases=phases),
            test=images.test,
            rate=rate,
            reports=Reports(
                comm,
                lambda known: open_gauges(comm, device, known),
                task,
                every_steps=config.report_every_steps,
                device=device,
            ),
            progress=Progress(Position()),
            epochs=config.epochs,
            hooks=[Limits(step, max_skipped_steps=config.max_skipped_steps, check_replicas_every=0)],
            points=AgreedSavePoints(
                comm, threading.Event(), every_s=float(config.checkpoint_every_s), every_steps=None
            ),
            watchdog=watch,
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
        if loop.step.slots.comm.rank == 0:
            answer(chosen.out, clock, loop.step.device)


if __name__ == "__main__":
    main()
