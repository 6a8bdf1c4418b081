"""One epoch of training, and one evaluation shared by all ranks."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hvdtrain.checkpoint.save_points import NEVER, SavePoints
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import TOO_MANY_SKIPPED, EndOfRun
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.watchdog import OFF, Watchdog
from hvdtrain.timing.phases import Phases
from hvdtrain.train import divergence
from hvdtrain.train.divergence import Skipped
from hvdtrain.train.reports import Means, Report, Reports, Totals, Window
from hvdtrain.train.schedule import LearningRate
from hvdtrain.train.step import TrainingStep, precision_context
from hvdtrain.vision import augment, models
from hvdtrain.vision import images as data


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


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands between two steps."""

    step: int = 0  # taken or skipped so far
    epoch: int = 0  # the one at hand, from 0
    visited: int = 0  # images of this epoch, by all ranks; once it is all of them, the evaluation is next
    totals: Totals = field(default_factory=Totals)  # of this epoch
    train_s: float = 0.0  # spent on this epoch

    def after(self, report: Report, *, train_s: float) -> "Position":
        """Where the run stands after a report."""
        totals = self.totals + report.totals
        return replace(self, step=report.step, visited=report.visited, totals=totals, train_s=train_s)


class Limits:
    """What ends a run: too many skipped steps in a row, replicas that differ."""

    def __init__(self, *, max_skipped_steps: int, check_replicas_every: int) -> None:
        self._max_skipped_steps = max_skipped_steps
        self._check_replicas_every = check_replicas_every
        self.skipped_in_a_row = 0

    def after_step(self, comm: Comm, model: nn.Module, step: int, skipped: Skipped | None) -> None:
        """Raise EndOfRun on all ranks where a limit is reached after step 1, 2, ..."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped and self.skipped_in_a_row >= self._max_skipped_steps:
            raise EndOfRun(
                f"{self.skipped_in_a_row} steps in a row were not finite, up to step {step}; the {skipped.source} of "
                f"rank {skipped.rank} first: lower --lr, set --clip-norm, or look at that rank's data",
                status=TOO_MANY_SKIPPED,
                reason="too many skipped steps",
            )
        if self._check_replicas_every and step % self._check_replicas_every == 0:
            divergence.check_replicas(comm, model, step)


def train_epoch(
    step: TrainingStep,
    images: data.Images,
    pictures: Pictures,
    *,
    start: Position,
    seed: int,
    global_batch: int,
    micro_batch: int,
    lr: LearningRate,
    average: AveragedModel | None,
    limits: Limits,
    spikes: divergence.SpikeWatch,
    reports: Reports,
    device: torch.device,
    save_points: SavePoints = NEVER,
    watchdog: Watchdog = OFF,
    faults: Faults = NONE,
) -> Iterator[Report]:
    """Visit each training image once that is left of an epoch; report at report and save points and at the end.

    At most `micro_batch` images of a rank's part of the global batch go through the model at a time. `average`, if
    any, follows the model after every step. The learning rate follows the share of the epoch that was visited, so that
    it does not mind if the images before `start` came in batches of another size. At a limit the epoch ends early.
    """
    comm, phases = step.comm, step.phases
    step.model.train()
    order = data.permutation(len(images.train), seed=seed, epoch=start.epoch)
    noise = augment.draw_noise(len(images.train), height=images.height, seed=seed, epoch=start.epoch, device=device)
    batches = data.rank_batches(order[start.visited :], global_batch=global_batch, rank=comm.rank, size=comm.size)
    parts = [
        batch.samples.tensor_split(data.passes(batch.global_count, size=comm.size, micro_batch=micro_batch))
        for batch in batches
    ]
    arriving = images.train.batches([part for batch_parts in parts for part in batch_parts], device, phases)
    visited, last = start.visited, start.step + len(batches)
    epoch_begin = start.epoch * math.ceil(len(order) / global_batch)  # by the schedule
    window = Window()
    for number, (batch, batch_parts) in enumerate(zip(batches, parts, strict=True), start=start.step + 1):
        watchdog.working(number)
        faults.at("step", number, model=step.model)
        phases.enter("other")
        to_do = save_points.ask(number)
        inputs = _inputs(batch_parts, arriving, pictures, noise, phases)
        if faults.poisons_loss(number):
            inputs = ((images * math.nan, labels) for images, labels in inputs)
        due = reports.due(number, last=last)
        rate, count = lr(epoch_begin + visited / global_batch), len(batch.samples)
        done = step(inputs, passes=len(batch_parts), global_count=batch.global_count, lr=rate, measure=due)
        window.visit(count)
        visited += batch.global_count
        window.unreadable += done.unreadable
        count -= done.unreadable
        if done.skipped:
            window.skipped.append((number, done.skipped))
        else:
            window.add(loss=done.loss_sum, right=done.right, count=count)
            spike = spikes.see(number, done.loss_sum / count) if count else None
            window.spikes += [spike] if spike else []
            if average is not None:
                average.update_parameters(step.model)
        phases.enter("other")
        end = None
        try:
            limits.after_step(comm, step.model, number, done.skipped)
        except EndOfRun as reached:
            end = reached
        asked = to_do()
        if due or end or asked.save:
            phases.enter("record")
            yield reports.share(
                window,
                step=number,
                lr=rate,
                grad_norm=done.grad_norm if due else None,
                loss_scale=step.scaler.get_scale(),
                visited=visited,
                asked=asked,
                end=end,
            )
            window = Window()
        phases.step_done()
        if end:
            return


def _inputs(
    parts: Iterable[Tensor],
    arriving: Iterator[tuple[Tensor, Tensor]],
    pictures: Pictures,
    noise: augment.Noise,
    phases: Phases,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's input for the sample indices (N,) of each part."""
    for part in parts:
        phases.enter("read")
        raw, labels = next(arriving)
        phases.enter("augment")
        yield pictures.for_training(raw, noise.of(part.to(raw.device))), labels


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
    step: int,
    save_points: SavePoints = NEVER,
    watchdog: Watchdog = OFF,
) -> Means | None:
    """Loss and accuracy on the test split, each image on exactly one rank; None where the ranks were asked to leave.

    The ranks' batch-norm statistics are averaged first, so that all of them evaluate the same model.
    """
    model.eval()
    statistics = [buffer for layer in models.batch_norms(model) for buffer in layer.buffers()]
    own = [buffer.clone() for buffer in statistics]
    comm.average_(statistics)
    mine = torch.arange(len(images.test))[data.share(len(images.test), comm.rank, comm.size)]
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    batches_of_all = math.ceil(len(images.test) // comm.size / batch)  # a rank may have one more
    for number, (raw, labels) in enumerate(images.test.batches(data.pieces(mine, batch), device)):
        watchdog.evaluating(step)
        if number < batches_of_all and save_points.ask(step)().leave:
            torch._foreach_copy_(statistics, own)
            return None
        with precision_context(device, precision):
            logits = model(pictures.for_evaluation(raw)).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        totals += torch.stack([loss, right, (labels != data.UNREADABLE).sum()])
    loss, right, count = comm.sum(totals).tolist()
    return Totals(loss=loss, right=right, count=count).means()
