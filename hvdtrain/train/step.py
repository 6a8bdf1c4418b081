"""One optimizer step on all ranks: right, or skipped by all of them together."""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.ranks.comm import Comm, GradientSync
from hvdtrain.timing.phases import OFF, Phases
from hvdtrain.train.batch_norm import SyncBatchNorm2d
from hvdtrain.train.divergence import Skipped
from hvdtrain.vision import models
from hvdtrain.vision.images import UNREADABLE

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_context(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to bf16 or fp16; nothing for fp32."""
    return torch.autocast(device.type, _DTYPES[precision], enabled=precision != "fp32")


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """This rank's part of a step."""

    loss_sum: float  # over its images; not finite where the rank's forward pass failed
    right: int  # how many of them were classified correctly
    unreadable: int = 0  # how many of them were no images
    skipped: Skipped | None  # the same on all ranks
    grad_norm: float = math.nan  # 2-norm of the summed gradients before clipping; NaN where it was not asked for


@dataclass(kw_only=True)
class TrainingStep:
    """What every step uses; call it with this rank's part of a global batch.

    The order is: sum over ranks, unscale (fp16), finite or not, clip by value, clip by norm, step or skip, loss scale.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    comm: Comm
    sync: GradientSync
    scaler: GradScaler  # disabled unless fp16
    precision: str
    label_smoothing: float
    clip_value: float | None  # per gradient element
    clip_norm: float | None  # of all gradients together
    phases: Phases = OFF
    _statistics: list[Tensor] = field(init=False)  # batch norm's running ones
    _before: list[Tensor] = field(init=False)  # the same before the step

    def __post_init__(self) -> None:
        buffers = [buffer for layer in models.batch_norms(self.model) for buffer in layer.buffers()]
        self._statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._before = [buffer.clone() for buffer in self._statistics]

    def __call__(
        self,
        micro_batches: Iterable[tuple[Tensor, Tensor]],
        *,
        passes: int,
        global_count: int,
        lr: float,
        measure: bool = False,
    ) -> StepDone:
        """Take one step with the given learning rate, or skip it on all ranks.

        `micro_batches` yields `passes` times images (N, 3, H, W) float32 and labels (N,); N may be 0. The loss is
        divided by `global_count`, the images of all ranks and passes together, so that the summed gradients are those
        of the mean loss. `measure` asks for the gradients' norm.
        """
        if self._statistics:
            torch._foreach_copy_(self._before, self._statistics)
        random = _random_state()
        kept: list[tuple[Tensor, Tensor]] = []
        losses: list[Tensor] = []
        sound: list[Tensor] = []
        counts: list[Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.expect(passes)
        for images, labels in micro_batches:
            self.phases.enter("forward")
            kept.append((images, labels))
            logits, loss = self._forward(images, labels)
            self.phases.enter("backward")
            # A loss or a running statistic that is not finite does not always have such gradients: this makes sure of
            # it, so that the other ranks hear of it with the sum.
            sound.append(torch.isfinite(loss.detach()) & self._statistics_are_finite(loss.device))
            self.scaler.scale(loss * torch.where(sound[-1], 1.0, torch.nan) / global_count).backward()
            losses.append(loss.detach().double())
            counts.append(torch.stack([(logits.argmax(1) == labels).sum(), (labels == UNREADABLE).sum()]))
        assert len(kept) == passes
        self.phases.enter("sync")
        self.sync.finish()
        self.phases.enter("optimizer")
        self.scaler.unscale_(self.optimizer)
        loss_sum = torch.stack(losses).sum().item()
        gradients = [
            one.grad for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None
        ]
        # Every rank has the same summed gradients, and NaN and infinity survive a sum, so all ranks decide alike
        # without asking each other. That would not hold for Adasum (it divides by norms), inside process sets (their
        # sums differ), or for sparse gradients (gathered, not summed). Reading the answer costs little: Horovod has
        # waited for the device already.
        finite = bool(torch.isfinite(nn.utils.get_total_norm(gradients, norm_type=torch.inf)))
        grad_norm = nn.utils.get_total_norm(gradients).item() if measure else math.nan
        skipped = None
        if finite:
            self._clip_and_step(lr)
        else:
            finite_loss = math.isfinite(loss_sum)
            forward = None if bool(torch.stack(sound).all()) else "batch norm" if finite_loss else "loss"
            skipped = self._find_source(kept, random, forward, global_count)
        self.scaler.update()
        right, unreadable = torch.stack(counts).sum(0).tolist()
        return StepDone(loss_sum=loss_sum, right=right, unreadable=unreadable, skipped=skipped, grad_norm=grad_norm)

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        few = len(labels) < 2
        frozen: AbstractContextManager[None] = _frozen_batch_norm(self.model) if few else nullcontext()
        with precision_context(images.device, self.precision):
            with frozen:
                logits = self.model(images)  # (N, classes)
            self.phases.enter("loss")
            loss = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self.label_smoothing)
        return logits, loss

    def _clip_and_step(self, lr: float) -> None:
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)

    def _find_source(
        self, kept: list[tuple[Tensor, Tensor]], random: list[Tensor], forward: str | None, global_count: int
    ) -> Skipped:
        """The first rank whose forward pass, or else whose gradients, were not finite. All ranks call this together.

        `forward` is what was not finite in this rank's. Batch norm over all ranks spreads one rank's trouble in the
        forward pass to all of them: then rank 0 stands for all.
        """
        self.phases.enter("other")
        self._restore_statistics()
        for rank, source in enumerate(self.comm.gather(forward)):
            if source is not None:
                return Skipped(rank=rank, source=source)
        # Once more without Horovod: autograd.grad does not reach the hooks that communicate.
        trainable = [one for one in self.model.parameters() if one.requires_grad]
        _restore_random_state(random)
        bad_here = False
        for images, labels in kept:
            scaled = self.scaler.scale(self._forward(images, labels)[1] / global_count)
            self.phases.enter("other")
            gradients = torch.autograd.grad(scaled, trainable, allow_unused=True)
            bad_here |= not all(bool(torch.isfinite(one).all()) for one in gradients if one is not None)
        self._restore_statistics()
        bad_gradients = self.comm.gather(bad_here)
        # Where each rank's are finite it is their sum that is not: rank 0 stands for all.
        return Skipped(rank=bad_gradients.index(True) if any(bad_gradients) else 0, source="gradients")

    def _statistics_are_finite(self, device: torch.device) -> Tensor:
        if not self._statistics:
            return torch.ones((), dtype=torch.bool, device=device)
        return torch.isfinite(nn.utils.get_total_norm(self._statistics, norm_type=torch.inf))

    def _restore_statistics(self) -> None:
        if self._statistics:
            torch._foreach_copy_(self._statistics, self._before)


def _random_state() -> list[Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def _restore_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def _frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    """Use the running statistics: the variance of a single image's 1x1 features, or of none, does not exist.

    Batch norm over all ranks goes on: there are other images.
    """
    local = [layer for layer in models.batch_norms(model) if not isinstance(layer, SyncBatchNorm2d)]
    training = [layer for layer in local if layer.training]
    for layer in training:
        layer.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.train()
