"""Tasks, steps and micro-batches of images for tests, put together in one place."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.blocks import Cuts
from hvdtrain.core.every_step import EveryStep
from hvdtrain.core.layout import Layout
from hvdtrain.core.position import Position
from hvdtrain.core.step import Slots, Step
from hvdtrain.loop.draft import Draft, Job
from hvdtrain.loop.feed.feed import Resident
from hvdtrain.loop.loop import Loop
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.save_points import NEVER
from hvdtrain.loop.witnesses.find_nan import FindNan
from hvdtrain.program.checks import require_batches, require_job
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe.schedule import LearningRate
from hvdtrain.tasks.vision.augment import Augmentations
from hvdtrain.tasks.vision.images import Images
from hvdtrain.tasks.vision.task import ImageTask

CPU = torch.device("cpu")


def split(count, *, seed=0, side=16):
    """Random images (count, 3, side, side) with labels 0 to 9 in turn."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return Resident(images=images, labels=torch.arange(count) % 10)


def images_of(train, test, *, is_mirrorable=True):
    """A data set of 16 x 16 pixels on the scale 0 to 1."""
    return Images(
        train=train, test=test, classes=10, height=16, mean=(0.0,) * 3, std=(1.0,) * 3, is_mirrorable=is_mirrorable
    )


def task_of(images=None, *, augmentations=None, label_smoothing=0.0, seed=0, **options):
    """Classification of these images, or of a few random ones."""
    images = images or images_of(split(1), split(1))
    return ImageTask(
        images,
        augmentations or Augmentations(),
        seed=seed,
        device=CPU,
        label_smoothing=label_smoothing,
        **options,
    )


def step_of(
    model,
    *,
    comm=None,
    sync=None,
    where=None,
    when=None,
    witnesses=None,
    scaler=None,
    optimizer=None,
    task=None,
    label_smoothing=0.0,
    **changes,
):
    """A step in fp32 of SGD, without clipping or a moving average; it looks for the rank with bad gradients."""
    return Step(
        model=model,
        task=task or task_of(label_smoothing=label_smoothing),
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=123.0),
        slots=Slots(
            comm=comm or SerialComm(),
            how=sync or GradientSync(),
            where=where or Layout(),
            when=when or EveryStep(),
            witnesses=[FindNan()] if witnesses is None else witnesses,
        ),
        scaler=scaler or GradScaler("cpu", enabled=False),
        **changes,
    )


def conv_net(channels=8):
    """A convolution, batch norm and a classifier, which begin with the same weights every time."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, 10))


def same(one, other):
    """Whether two nested values, such as state_dicts, have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def draft_of(comm, model, optimizer, *, how, average=None, scaler=None, where=None):
    """A step under construction, of which features read no more."""
    return Draft(
        job=SimpleNamespace(comm=comm, model=model),
        where=where or Layout(),
        optimizer=optimizer,
        scaler=scaler or GradScaler("cpu", enabled=False),
        average=average,
        how=how,
    )


def loop_of(step, feed, *, reports, rate, limits=None, points=NEVER, test=None, **options):
    """The loop of a training that stands at its beginning, if `progress` does not say otherwise."""
    if limits is not None:
        limits.step = step
    return Loop(
        step=step,
        feed=feed,
        test=test,
        rate=rate,
        reports=reports,
        hooks=[] if limits is None else [limits],
        points=points,
        **{"progress": Progress(Position()), "epochs": 1, **options},
    )


def required_sizes(settings, *, train, test=1, ranks=1, unit="images", max_steps=None):
    """How the ranks cut an epoch, once all features have taken the job; BadInput if one does not."""
    sizes = require_batches(settings, train=train, test=test, ranks=ranks, unit=unit)
    job = Job(
        comm=SerialComm(),
        device=CPU,
        model=nn.Linear(1, 1),
        task=task_of(),
        train=split(1),
        cuts=Cuts(),
        sizes=sizes,
        steps=max_steps or settings.epochs * sizes.steps_per_epoch,
        length_option="--epochs" if max_steps is None else "--max-steps",
    )
    require_job(settings, job)
    return sizes


def rate_of(peak, total_steps, shape="constant", **options):
    """A schedule without warm-up, the same for every batch."""
    return LearningRate(
        **{"batch": 1.0, "scaling": None, "warmup_steps": 0, **options}, peak=peak, total_steps=total_steps, shape=shape
    )


def run_step(step, *micro_batches, global_count=None, lr=0.5, **options):
    """One step over pairs of images (N, 3, H, W) and labels (N,)."""
    batches = [{"images": images, "labels": labels} for images, labels in micro_batches]
    count = sum(len(batch["labels"]) for batch in batches) if global_count is None else global_count
    return step(iter(batches), backward_passes=len(batches), global_count=count, lr=lr, **options).read()
