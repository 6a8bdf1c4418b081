"""Tasks, steps and micro-batches of images for tests, put together in one place."""

import torch
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.feed import Resident
from hvdtrain.core.step import TrainingStep
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe.schedule import LearningRate
from hvdtrain.vision.augment import Augmentations
from hvdtrain.vision.images import Images
from hvdtrain.vision.task import ImageTask

CPU = torch.device("cpu")


def split(count, *, seed=0, side=16):
    """Random images (count, 3, side, side) with labels 0 to 9 in turn."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return Resident(images=images, labels=torch.arange(count) % 10)


def images_of(train, test, *, mirror=True):
    """A data set of 16 x 16 pixels on the scale 0 to 1."""
    return Images(train=train, test=test, classes=10, height=16, mean=(0.0,) * 3, std=(1.0,) * 3, mirror=mirror)


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


def step_of(model, *, comm=None, sync=None, scaler=None, optimizer=None, task=None, label_smoothing=0.0, **changes):
    """A step in fp32 of SGD, without clipping or a moving average; it looks for the rank with bad gradients."""
    return TrainingStep(
        model=model,
        task=task or task_of(label_smoothing=label_smoothing),
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=123.0),
        comm=comm or SerialComm(),
        sync=sync or SerialComm().gradient_sync(model, compression="none"),
        scaler=scaler or GradScaler("cpu", enabled=False),
        **{"precision": "fp32", "find_nan": True, **changes},
    )


def rate_of(peak, total_steps, shape="constant", **options):
    """A schedule without warm-up, the same for every batch."""
    return LearningRate(
        **{"batch": 1.0, "scaling": None, "warmup_steps": 0, **options}, peak=peak, total_steps=total_steps, shape=shape
    )


def take(step, *micro_batches, global_count=None, lr=0.5, **options):
    """One step over pairs of images (N, 3, H, W) and labels (N,)."""
    batches = [{"images": images, "labels": labels} for images, labels in micro_batches]
    count = sum(len(batch["labels"]) for batch in batches) if global_count is None else global_count
    return step(iter(batches), backward_passes=len(batches), global_count=count, lr=lr, **options).read()
