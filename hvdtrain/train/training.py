"""What an epoch needs, put together from the settings."""

import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel
from torchvision.models import EfficientNet

from hvdtrain.checkpoint.save_points import NEVER, SavePoints
from hvdtrain.ranks.comm import Comm
from hvdtrain.record import gauges
from hvdtrain.record.gauges import Gauges
from hvdtrain.safety import watchdog
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.watchdog import Watchdog
from hvdtrain.timing.phases import OFF, Phases, clock
from hvdtrain.timing.trace import TorchTrace, unmeasured_steps
from hvdtrain.train import batch_norm as sync_bn
from hvdtrain.train import optim
from hvdtrain.train.divergence import SpikeWatch
from hvdtrain.train.loop import Limits, Pictures, Position, evaluate, train_epoch
from hvdtrain.train.preflight import images_at_a_time
from hvdtrain.train.reports import MOST_CURVES, Means, Report, Reports
from hvdtrain.train.schedule import LearningRate, scaled_lr
from hvdtrain.train.step import TrainingStep
from hvdtrain.vision import images as data
from hvdtrain.vision.config import EffnetConfig


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that an epoch needs, put together from the settings."""

    config: EffnetConfig
    images: data.Images
    pictures: Pictures
    step: TrainingStep
    lr: LearningRate
    average: AveragedModel | None
    limits: Limits
    spikes: SpikeWatch
    reports: Reports
    device: torch.device
    micro_batch: int
    global_batch: int
    steps_per_epoch: int

    def epoch(
        self,
        start: Position,
        save_points: SavePoints = NEVER,
        watchdog: Watchdog = watchdog.OFF,
        faults: Faults = NONE,
    ) -> Iterator[Report]:
        """Train once on every image that is left of the epoch; all ranks go through the reports together."""
        return train_epoch(
            self.step,
            self.images,
            self.pictures,
            start=start,
            seed=self.config.seed,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            lr=self.lr,
            average=self.average,
            limits=self.limits,
            spikes=self.spikes,
            reports=self.reports,
            save_points=save_points,
            watchdog=watchdog,
            faults=faults,
            device=self.device,
        )

    @property
    def evaluated(self) -> nn.Module:
        """The moving average of the weights if there is one, else the model itself."""
        return self.step.model if self.average is None else self.average.module

    def evaluate(self, step: int, save_points: SavePoints = NEVER, watchdog: Watchdog = watchdog.OFF) -> Means | None:
        """The test split after this step; None where the ranks were asked to leave."""
        return evaluate(
            self.evaluated,
            self.images,
            self.pictures,
            self.step.comm,
            batch=self.micro_batch,
            precision=self.config.precision,
            step=step,
            save_points=save_points,
            watchdog=watchdog,
            device=self.device,
        )


def assemble(
    comm: Comm,
    config: EffnetConfig,
    images: data.Images,
    model: EfficientNet,
    device: torch.device,
    *,
    phases: Phases = OFF,
) -> Training:
    """Bring the model to the device, equal on all ranks, and put the optimizer and the rest around it."""
    micro_batch = images_at_a_time(config, comm.size)
    global_batch = micro_batch * config.accumulate_steps * comm.size
    steps_per_epoch = math.ceil(len(images.train) / global_batch)
    model.to(device)
    comm.broadcast_(model)
    model.to(memory_format=memory_format(config))
    if config.sync_bn:
        sync_bn.convert(model, comm)
    if config.compile:
        model.compile()
    lr = learning_rate(config, global_batch, steps_per_epoch)
    groups = optim.parameter_groups(model, config.weight_decay, decay_all=config.decay_all)
    horizon_steps = config.ema_epochs * steps_per_epoch
    return Training(
        config=config,
        images=images,
        pictures=pictures_for(config, images, device),
        step=TrainingStep(
            model=model,
            optimizer=optim.build(config.optimizer, groups, lr.peak),
            comm=comm,
            sync=comm.gradient_sync(model, compression=compression(config, device), groups=config.fusion_groups),
            scaler=GradScaler(device.type, enabled=config.precision == "fp16"),
            precision=config.precision,
            label_smoothing=config.label_smoothing,
            clip_value=config.clip_value,
            clip_norm=config.clip_norm,
            phases=phases,
        ),
        lr=lr,
        average=optim.moving_average(model, horizon_steps=horizon_steps) if config.ema_epochs else None,
        limits=Limits(max_skipped_steps=config.max_skipped_steps, check_replicas_every=config.check_replicas_every),
        spikes=SpikeWatch(comm.rank),
        reports=Reports(comm, host_gauges(comm, device), every_steps=config.report_every_steps, device=device),
        device=device,
        micro_batch=micro_batch,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
    )


def step_clock(comm: Comm, config: EffnetConfig, folder: Path, device: torch.device) -> Phases:
    """What measures the phases of this rank's steps, if anything does."""
    if config.torch_profile is None:
        return clock(config.profile, device)
    phases = clock(config.profile, device, unmeasured_steps=unmeasured_steps(config.torch_profile))
    trace = folder / "profile" / f"rank-{comm.rank}.pt.trace.json.gz"
    return TorchTrace(phases, trace, steps=config.torch_profile, device=device)


def host_gauges(comm: Comm, device: torch.device) -> Gauges:
    """The first local rank of each host reads the GPUs of all ranks there."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    host = socket.gethostname()
    here = [theirs for where, theirs in comm.gather([host, uuid]) if where == host and theirs is not None]
    if comm.local_rank != 0:
        return Gauges(gauges.none)
    return Gauges(gauges.of_host(here, each=comm.size <= MOST_CURVES))


def compression(config: EffnetConfig, device: torch.device) -> str:
    """How gradients travel."""
    return config.compression or ("fp16" if device.type == "cuda" else "none")


def memory_format(config: EffnetConfig) -> torch.memory_format:
    """How images and kernels lie in memory."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


def learning_rate(config: EffnetConfig, global_batch: int, steps_per_epoch: int) -> LearningRate:
    """The schedule, its peak scaled to the global batch if the recipe says so."""
    peak = optim.BASE_LR[config.optimizer] if config.lr is None else config.lr
    if config.scale_lr:
        peak = scaled_lr(peak, optimizer=config.optimizer, global_batch=global_batch)
    return LearningRate(
        peak=peak,
        warmup_steps=round(min(config.warmup_epochs, config.epochs / 2) * steps_per_epoch),
        total_steps=config.epochs * steps_per_epoch,
        shape=config.schedule,
    )


def pictures_for(config: EffnetConfig, images: data.Images, device: torch.device) -> Pictures:
    """What is done to the images on the device."""
    return Pictures(
        mean=torch.tensor(images.mean if config.normalize else (0.0, 0.0, 0.0), device=device),
        std=torch.tensor(images.std if config.normalize else (1.0, 1.0, 1.0), device=device),
        crop=config.augment,
        flip=config.augment and images.mirror,
        cutout=config.cutout,
        memory_format=memory_format(config),
    )
