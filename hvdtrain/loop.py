"""One epoch of training, and one evaluation shared by all ranks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hvdtrain import augment, data, models
from hvdtrain.comm import Comm
from hvdtrain.schedule import LearningRate
from hvdtrain.step import TrainingStep, precision_context


@dataclass(frozen=True, kw_only=True)
class Means:
    """Over all images of all ranks."""

    loss: float
    accuracy: float  # 0 to 1


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """How uint8 images (N, 3, H, W) become the model's float32 input."""

    mean: Tensor  # (3,)
    std: Tensor  # (3,)
    crop: bool
    flip: bool
    cutout: int  # pixels, 0 for none
    memory_format: torch.memory_format

    def for_training(self, images: Tensor, noise: augment.Noise) -> Tensor:
        """Augmented with the noise of just these samples, and normalised."""
        if self.crop:
            images = augment.random_crop(images, noise.shift)
        if self.flip:
            images = augment.random_flip(images, noise.flip)
        if self.cutout:
            images = augment.cutout(images, noise.hole, self.cutout)
        return self.for_evaluation(images)

    def for_evaluation(self, images: Tensor) -> Tensor:
        """Normalised."""
        return augment.normalise(images, self.mean, self.std).contiguous(memory_format=self.memory_format)


def train_epoch(
    step: TrainingStep,
    images: data.Images,
    pictures: Pictures,
    comm: Comm,
    *,
    epoch: int,
    seed: int,
    global_batch: int,
    micro_batch: int,
    lr: LearningRate,
    average: AveragedModel | None,
    device: torch.device,
) -> tuple[Means, int]:
    """Visit each training image once; the means, reduced once at the end, and the number of steps skipped.

    `micro_batch` images of a rank's part of the global batch go through the model at a time. `average`, if any,
    follows the model after every step.
    """
    step.model.train()
    order = data.permutation(len(images.train), seed=seed, epoch=epoch)
    noise = augment.draw_noise(len(images.train), height=images.height, seed=seed, epoch=epoch, device=device)
    batches = data.rank_batches(order, global_batch=global_batch, rank=comm.rank, size=comm.size)
    parts = [data.pieces(batch.samples, micro_batch) for batch in batches]
    arriving = images.train.batches([part for batch_parts in parts for part in batch_parts], device)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    skipped = 0
    for number, (batch, batch_parts) in enumerate(zip(batches, parts, strict=True)):
        inputs = (
            (pictures.for_training(raw, noise.of(part.to(device))), labels)
            for part, (raw, labels) in zip(batch_parts, arriving, strict=False)
        )
        done = step(
            inputs,
            passes=len(batch_parts),
            global_count=batch.global_count,
            lr=lr(epoch * len(batches) + number),
        )
        totals += torch.stack([done.loss_sum, done.right, torch.tensor(len(batch.samples), device=device)])
        skipped += done.skipped
        if average is not None:
            average.update_parameters(step.model)
    return _means(totals, comm), skipped


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: data.Images,
    pictures: Pictures,
    comm: Comm,
    *,
    batch: int,
    precision: str,
    device: torch.device,
) -> Means:
    """Loss and accuracy on the test split, each image on exactly one rank.

    The ranks' batch-norm statistics are averaged first, so that all of them evaluate the same model.
    """
    model.eval()
    comm.average_([buffer for layer in models.batch_norms(model) for buffer in layer.buffers()])
    mine = torch.arange(len(images.test))[data.share(len(images.test), comm.rank, comm.size)]
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for raw, labels in images.test.batches(data.pieces(mine, batch), device):
        with precision_context(device, precision):
            logits = model(pictures.for_evaluation(raw)).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        totals += torch.stack([loss, right, torch.tensor(len(labels), device=device)])
    return _means(totals, comm)


def _means(totals: Tensor, comm: Comm) -> Means:
    loss, right, count = comm.sum(totals).tolist()
    return Means(loss=loss / count, accuracy=right / count)
