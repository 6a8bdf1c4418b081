"""A training that takes milliseconds per step, on images that can be told apart, put together as the script does."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from hvdtrain import effnet
from hvdtrain.checkpoint import changes
from hvdtrain.checkpoint.save_points import NEVER
from hvdtrain.checkpoint.state import State
from hvdtrain.core.feed import Feed, Resident
from hvdtrain.core.loop import Limits, evaluate, state_of, train_epoch
from hvdtrain.core.reports import Reports
from hvdtrain.core.step import TrainingStep
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe.schedule import LearningRate, learning_rate
from hvdtrain.tracking.gauges import Gauges, none
from hvdtrain.vision import config, models
from hvdtrain.vision.config import EffnetConfig
from hvdtrain.vision.images import Images
from hvdtrain.vision.task import image_task
from tests.steps import CPU

SMALL = replace(
    config.scaled(), data="digits", model="efficientnet_tiny", batch_size_per_rank=16, epochs=20, dropout=0.3, run="r"
)
TRAIN, TEST = 53, 10  # 4 steps of at most 16 images


class Noted(Resident):
    """Notes which images were asked for, batch by batch."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
        super().__init__(images=pixels, labels=torch.arange(count) % 10)
        self.visited = []

    def batches(self, indices, *rest):
        for samples, batch in zip(indices, super().batches(indices, *rest), strict=True):
            self.visited.append(samples.tolist())
            yield batch


def images_of(train=TRAIN):
    plain = {"classes": 10, "height": 16, "mean": (0.5,) * 3, "std": (0.25,) * 3, "mirror": False}
    return Images(train=Noted(train, 1), test=Noted(TEST, 2), **plain)


@dataclass
class Begun:
    """What a script has when it enters its loop."""

    config: EffnetConfig
    images: Images
    step: TrainingStep
    feed: Feed
    lr: LearningRate
    limits: Limits
    reports: Reports

    def epoch(self, start, save_points=NEVER, **options):
        kept = {"lr": self.lr, "limits": self.limits, "reports": self.reports, "save_points": save_points}
        return train_epoch(self.step, self.feed, start, **kept, **options)

    def evaluate(self, number, save_points=NEVER, **options):
        kept = {"micro_batch": self.feed.sizes.micro_batch, "save_points": save_points}
        return evaluate(self.step, self.images.test, number, **kept, **options)

    @property
    def parts(self) -> State:
        return state_of(self.step, self.limits, self.reports, seed=self.config.seed)

    @property
    def about(self):
        return changes.about(
            asdict(self.config),
            np=self.step.comm.size,
            global_batch=self.feed.sizes.global_batch,
            samples=len(self.images.train),
            unit="images",
        )


def begun(comm=None, *, train=TRAIN, images=None, runs_dir=Path("runs"), settings=SMALL, **changed) -> Begun:
    """Put together from the settings, before its first step."""
    comm, settings = comm or SerialComm(), replace(settings, runs_dir=runs_dir, **changed)
    found = images or images_of(train)
    model = models.build_on_all(
        comm, settings.model, classes=10, seed=settings.seed, dropout=settings.dropout,
        stochastic_depth=settings.stochastic_depth, stem_stride=settings.stem_stride,
    )  # fmt: skip
    sizes = effnet.cut(comm, settings, found)
    lr = learning_rate(settings, samples=len(found.train), steps_per_epoch=sizes.steps_per_epoch)
    task = image_task(settings, found, CPU)
    step = effnet.step_for(comm, settings, model, task, CPU, lr=lr.peak, sizes=sizes)
    torch.manual_seed(settings.seed + comm.rank)
    return Begun(
        config=settings,
        images=found,
        step=step,
        feed=Feed(found.train, task, comm.data, sizes, seed=settings.seed, device=CPU),
        lr=lr,
        limits=Limits(max_skipped_steps=settings.max_skipped_steps, check_replicas_every=settings.check_replicas_every),
        reports=Reports(comm, Gauges(none), task, every_steps=settings.report_every_steps, device=CPU),
    )


def weights(training):
    """All that is evaluated or goes on into the next step of a training."""
    step = training.step
    models = [step.model, *([] if step.average is None else [step.average])]
    return [value.clone() for model in models for value in model.state_dict().values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
