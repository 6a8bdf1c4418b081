"""Image classification as a task. N images of a batch, S of the training split, H W pixels."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.core.phases import Phase
from hvdtrain.core.task import UNREADABLE, Batch, Model, Sums, Task, Totals
from hvdtrain.tasks.vision.augment import Augmentations, Noise, draw_noise, normalise, scale_and_shift
from hvdtrain.tasks.vision.images import NO_LABEL, Images
from hvdtrain.tasks.vision.settings import EffnetSettings, unreadable_limit

_REMEDIES: Mapping[Phase, str] = {
    "read": "more cores per rank, smaller image files, data that fit on the device",
    "augment": "--augment standard or none",
    "to_device": "data that fit on the device, or larger batches",
}


class ImageTask(Task):
    """Turns uint8 images (N, 3, H, W) and labels (N,) into losses, accuracies and the model's input."""

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
        max_unreadable: int | None = None,
    ) -> None:
        """Create the task; `normalize` gives images mean 0 and deviation 1 per channel of the training split."""
        self.augmentations = augmentations
        self._images = images
        self._seed = seed
        self._device = device
        self.mean, self.std = (images.mean, images.std) if normalize else ((0.0,) * 3, (1.0,) * 3)
        self._scale, self._shift = scale_and_shift(self.mean, self.std, device)
        self._label_smoothing = label_smoothing
        self.memory_format, self.max_unreadable = memory_format, max_unreadable
        self._cached_noise: tuple[int, Noise] | None = None  # the current epoch, and its noise

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        images = raw["images"]
        if epoch is not None:
            images = self.augmentations(images, self._noise(epoch).select(samples))
        images = images.contiguous(memory_format=self.memory_format)  # as bytes, a quarter of the memory traffic
        images = normalise(images, self._scale, self._shift).contiguous(memory_format=self.memory_format)
        return {"images": images, "labels": raw["labels"]}

    def _noise(self, epoch: int) -> Noise:
        """Return the noise of every training sample, drawn once per epoch."""
        if self._cached_noise is None or self._cached_noise[0] != epoch:
            samples, height = len(self._images.train), self._images.height
            noise = draw_noise(samples, height=height, seed=self._seed, epoch=epoch, device=self._device)
            self._cached_noise = epoch, noise
        return self._cached_noise[1]

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        labels = batch["labels"]
        logits = model(*self.inputs(batch)).float()  # (N, classes)
        smoothing = self._label_smoothing if training else 0.0
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        correct, unreadable = (logits.argmax(1) == labels).sum(), (labels == NO_LABEL).sum()
        return Sums(loss=loss, count=len(labels) - unreadable, more={"right": correct, UNREADABLE: unreadable})

    def metrics(self, totals: Totals) -> dict[str, float]:
        count = totals["count"]
        return {"loss": totals["loss"] / count, "accuracy": totals["right"] / count}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        return f"accuracy {metrics['accuracy']:.2%}"


def image_task(config: EffnetSettings, images: Images, device: torch.device) -> ImageTask:
    """Return the task that the settings select."""
    return ImageTask(
        images,
        Augmentations(
            crop=config.augment != "none" and not images.is_cropped,
            flip=config.augment != "none" and images.is_mirrorable,
            cutout=config.cutout,
        ),
        seed=config.seed,
        device=device,
        normalize=config.normalize,
        label_smoothing=config.label_smoothing,
        memory_format=torch.channels_last if config.channels_last else torch.contiguous_format,
        max_unreadable=unreadable_limit(config, len(images.train)),
    )
