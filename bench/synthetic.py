"""Training on synthetic images, put together for benches that time its steps one by one."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from jobs import job_of, ranks_of, step_of
from mlp import mlp

from hvdtrain.core.pending import StepDone
from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.step import Step
from hvdtrain.core.task import Batch
from hvdtrain.feed.order import BatchSizes
from hvdtrain.program.join import with_reducer
from hvdtrain.ranks.device import choose_device
from hvdtrain.vision import data, models
from hvdtrain.vision.images import Images
from hvdtrain.vision.settings import EffnetSettings, scaled
from hvdtrain.vision.task import ImageTask, image_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticTraining:
    """One rank's part of a training, ready for its first step."""

    config: EffnetSettings
    images: Images
    task: ImageTask
    step: Step
    sizes: BatchSizes

    def batch(self, number: int = 0, phases: Phases = OFF) -> Batch:
        """This rank's batch of so many images, not augmented, read and prepared now."""
        comm, count = self.step.slots.comm, self.sizes.micro_batch
        first = count * (number * comm.size + comm.rank)
        samples = torch.arange(first, first + count, device=self.step.device)
        [raw] = self.images.train.batches([samples % len(self.images.train)], self.step.device, None, phases)
        phases.enter("augment")
        return self.task.prepare(raw, samples, None)

    def take(self, batch: Batch, *, measure: bool = False) -> StepDone:
        """One step over this batch."""
        count = self.sizes.global_batch
        return self.step([batch], backward_passes=1, global_count=count, lr=0.01, measure=measure).read()


def synthetic_training(model: str, batch: int, **settings: Any) -> SyntheticTraining:
    """All ranks' recipe `scaled` with these settings and `batch` images per rank and step; `model` may be 'mlp' too."""
    settings = {"data": "synthetic", "model": model, "batch_size_per_rank": batch, **settings}
    config, _ = with_reducer(dataclasses.replace(scaled(), **settings))
    comm = ranks_of(config)
    device = choose_device(comm)
    comm.start()
    images = data.load("synthetic", Path())
    task = image_task(config, images, device)
    torch.manual_seed(0)
    network = mlp() if model == "mlp" else models.build(model, classes=10)
    job = job_of(comm, config, device, model=network, task=task, train=images.train)
    step = step_of(config, job, lr=0.1)
    step.model.train()
    return SyntheticTraining(config=config, images=images, task=task, step=step, sizes=job.sizes)
