"""One optimizer step on all ranks: forward, backward, sum over ranks, unscale, clip, step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain import models
from hvdtrain.comm import GradientSync

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_context(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to bf16 or fp16; nothing for fp32."""
    return torch.autocast(device.type, _DTYPES[precision], enabled=precision != "fp32")


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """This rank's part of a step."""

    loss_sum: Tensor  # () over its images
    right: Tensor  # () how many of them were classified correctly
    skipped: bool  # fp16 gradients overflowed, on all ranks alike


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """What every step uses; call it with this rank's part of a global batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    scaler: GradScaler  # disabled unless fp16
    precision: str
    label_smoothing: float
    clip_value: float | None  # per gradient element
    clip_norm: float | None  # of all gradients together

    def __call__(
        self, micro_batches: Iterable[tuple[Tensor, Tensor]], *, passes: int, global_count: int, lr: float
    ) -> StepDone:
        """Take one step with the given learning rate.

        `micro_batches` yields `passes` times images (N, 3, H, W) float32 and labels (N,). The loss is divided by
        `global_count`, the images of all ranks and passes together, so that the summed gradients are those of the
        mean loss.
        """
        device = next(self.model.parameters()).device
        loss_sum = torch.zeros((), device=device)
        right = torch.zeros((), device=device)
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.expect(max(1, passes))  # a rank without images still takes part in the sum
        for images, labels in micro_batches:
            alone = len(labels) == 1
            with precision_context(device, self.precision):
                with _frozen_batch_norm(self.model) if alone else nullcontext():
                    logits = self.model(images)  # (N, classes)
                loss = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self.label_smoothing)
            self.scaler.scale(loss / global_count).backward()
            loss_sum += loss.detach()
            right += (logits.argmax(1) == labels).sum()
        self.sync.finish()
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The summed gradients are the same on every rank, so every rank's scaler decides the same.
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return StepDone(loss_sum=loss_sum, right=right, skipped=self.scaler.get_scale() < scale)


@contextmanager
def _frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    """Use the running statistics: the variance of a single image's 1x1 features does not exist."""
    training = [layer for layer in models.batch_norms(model) if layer.training]
    for layer in training:
        layer.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.train()
