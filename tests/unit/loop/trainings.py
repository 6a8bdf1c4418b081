"""A training that takes milliseconds per step, on images that can be told apart, put together as the script does."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from hvdtrain.checkpoint import changes
from hvdtrain.checkpoint.state import State
from hvdtrain.core.blocks import Cuts
from hvdtrain.insight.tracking.gauges import Gauges
from hvdtrain.loop.draft import Job
from hvdtrain.loop.evaluation import evaluate
from hvdtrain.loop.feed.feed import Feed
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.reports import Reports
from hvdtrain.loop.save_points import NEVER
from hvdtrain.program.assembly import build_step, place, rate_of, state_of
from hvdtrain.program.checks import require_batches, require_job
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe.average import limit_statistics
from hvdtrain.tasks.vision import models
from hvdtrain.tasks.vision import settings as vision_settings
from hvdtrain.tasks.vision.images import Images
from hvdtrain.tasks.vision.task import image_task
from tests.steps import CPU, loop_of, split

SMALL = replace(
    vision_settings.scaled(),
    data="digits",
    model="efficientnet_tiny",
    batch_size_per_rank=16,
    epochs=20,
    dropout=0.3,
    run="r",
)
TRAIN, TEST = 53, 10  # 4 steps of at most 16 images


def images_of(train=TRAIN):
    plain = {"classes": 10, "height": 16, "mean": (0.5,) * 3, "std": (0.25,) * 3, "is_mirrorable": False}
    return Images(train=split(train, seed=1), test=split(TEST, seed=2), **plain)


class Begun(SimpleNamespace):
    """What a script has when it enters its loop."""

    def epoch(self, start, save_points=NEVER, **options):
        kept = {"rate": self.lr, "limits": self.limits, "reports": self.reports, "points": save_points}
        return loop_of(self.step, self.feed, **kept, **options).steps(start)

    def evaluate(self, number, save_points=NEVER, **options):
        kept = {"micro_batch": self.feed.sizes.micro_batch, "save_points": save_points}
        return evaluate(self.step, self.images.test, number, **kept, **options)

    @property
    def parts(self) -> State:
        return state_of(self.step, self.limits, self.reports, seed=self.config.seed)

    @property
    def metadata(self):
        return changes.describe_run(
            asdict(self.config),
            np=self.step.slots.comm.size,
            global_batch=self.feed.sizes.global_batch,
            samples=len(self.images.train),
            unit="images",
        )


def begun(comm=None, *, train=TRAIN, images=None, runs_dir=Path("runs"), settings=SMALL, **changed) -> Begun:
    """Put together from the settings, before its first step."""
    comm, settings = comm or SerialComm(), replace(settings, runs_dir=runs_dir, **changed)
    found = images or images_of(train)
    torch.manual_seed(settings.seed)
    model = models.build(
        settings.model, classes=10, dropout=settings.dropout, stochastic_depth=settings.stochastic_depth,
        stem_stride=settings.stem_stride,
    )  # fmt: skip
    task, train_split = image_task(settings, found, CPU), found.train
    sizes = require_batches(
        settings, train=len(train_split), test=len(found.test), ranks=comm.data.size, unit=task.unit
    )
    job = Job(
        comm=comm,
        device=CPU,
        model=model,
        task=task,
        train=train_split,
        cuts=Cuts(blocks=models.blocks(model)),
        sizes=sizes,
        steps=settings.epochs * sizes.steps_per_epoch,
        precision=settings.precision,
    )
    require_job(settings, job)
    lr = rate_of(settings, job)
    step = build_step(settings, job, place(settings, job), lr=lr.peak)
    limit_statistics(model, passes=job.steps * settings.accumulate_steps)
    torch.manual_seed(settings.seed + comm.rank)
    every = settings.check_replicas_every
    return Begun(
        config=settings,
        images=found,
        step=step,
        feed=Feed(train_split, task, comm.data, sizes, seed=settings.seed, device=CPU),
        lr=lr,
        limits=Limits(step, max_skipped_steps=settings.max_skipped_steps, check_replicas_every=every),
        reports=Reports(comm, Gauges(dict), task, every_steps=settings.report_every_steps, device=CPU),
        job=job,
    )


def weights(training):
    """All that is evaluated or goes on into the next step of a training."""
    step = training.step
    models = [step.model, *([] if step.average is None else [step.average])]
    return [value.clone() for model in models for value in model.state_dict().values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
