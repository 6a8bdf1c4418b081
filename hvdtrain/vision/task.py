"""Image classification as a task for the loop. N images of a batch, S of the training split, H W pixels."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.core.task import UNREADABLE, Batch, Model, Sums, Totals
from hvdtrain.profiling.phases import Phase
from hvdtrain.vision.augment import Augmentations, Noise, draw_noise, normalise, scale_and_shift
from hvdtrain.vision.config import EffnetConfig
from hvdtrain.vision.images import NO_LABEL, Images

_REMEDIES: Mapping[Phase, str] = {
    "read": "more cores per rank or --workers (loader processes), smaller image files, data that fit on the device",
    "augment": "leave out --cutout or set --no-augment",
    "to_device": "data that fit on the device, or larger batches",
}


class ImageTask:
    """uint8 images (N, 3, H, W) and labels (N,) to losses, accuracies and what the model sees."""

    unit = "images"
    best = "accuracy"
    higher_is_better = True
    remedies = _REMEDIES

    def __init__(
        self,
        images: Images,
        augmentations: Augmentations,
        *,
        seed: int,
        device: torch.device,
        normalize: bool = True,
        label_smoothing: float = 0.0,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """`normalize` gives the training split's mean 0 and deviation 1 per channel."""
        self.augmentations = augmentations
        self._images = images
        self._seed = seed
        self._device = device
        self.mean, self.std = (images.mean, images.std) if normalize else ((0.0,) * 3, (1.0,) * 3)
        self._scale, self._shift = scale_and_shift(self.mean, self.std, device)
        self._label_smoothing = label_smoothing
        self._memory_format = memory_format
        self._drawn: tuple[int, Noise] | None = None  # the epoch at hand, and its noise

    def counts(self, samples: Tensor) -> Tensor:
        return torch.ones(len(samples))

    def cost(self, samples: Tensor) -> Tensor:
        return torch.ones(len(samples))

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        images = raw["images"]
        if epoch is not None:
            images = self.augmentations(images, self._noise(epoch).of(samples))
        images = normalise(images, self._scale, self._shift).contiguous(memory_format=self._memory_format)
        return {"images": images, "labels": raw["labels"]}

    def _noise(self, epoch: int) -> Noise:
        """That of every training sample, drawn once an epoch."""
        if self._drawn is None or self._drawn[0] != epoch:
            samples, height = len(self._images.train), self._images.height
            noise = draw_noise(samples, height=height, seed=self._seed, epoch=epoch, device=self._device)
            self._drawn = epoch, noise
        return self._drawn[1]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch["images"],)

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        labels = batch["labels"]
        logits = model(*self.inputs(batch)).float()  # (N, classes)
        smoothing = self._label_smoothing if training else 0.0
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        right, unreadable = (logits.argmax(1) == labels).sum(), (labels == NO_LABEL).sum()
        return Sums(loss=loss, count=len(labels) - unreadable, more={"right": right, UNREADABLE: unreadable})

    def metrics(self, totals: Totals) -> dict[str, float]:
        count = totals.get("count", 0.0)
        if not count:  # every step was skipped
            return {"loss": math.nan, "accuracy": math.nan}
        return {"loss": totals["loss"] / count, "accuracy": totals["right"] / count}

    def in_words(self, metrics: Mapping[str, float]) -> str:
        return f"accuracy {metrics['accuracy']:.2%}"


def memory_format(config: EffnetConfig) -> torch.memory_format:
    """How images and kernels lie in memory."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


def image_task(config: EffnetConfig, images: Images, device: torch.device) -> ImageTask:
    """The task of a run, as its settings say."""
    return ImageTask(
        images,
        Augmentations(
            crop=config.augment and not images.cropped, flip=config.augment and images.mirror, cutout=config.cutout
        ),
        seed=config.seed,
        device=device,
        normalize=config.normalize,
        label_smoothing=config.label_smoothing,
        memory_format=memory_format(config),
    )
