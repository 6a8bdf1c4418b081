"""Train an EfficientNet with Horovod.

    python -m hvdtrain.effnet --data digits --model efficientnet_tiny        one process, no MPI needed
    horovodrun -np 8 python -m hvdtrain.effnet                               one host, CIFAR-10
    mpirun -np 8 python -m hvdtrain.effnet                                   the same by mpirun
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.effnet         two hosts, the best GPUs of each

The result lies in runs/effnet/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel
from torchvision.models import EfficientNet
from tqdm import tqdm

from hvdtrain import data, exits, gauges, models, optim, phase_picture, sync_bn, tracking
from hvdtrain.comm import (
    Comm,
    agreed,
    choose_device,
    connect,
    cores_together,
    require_equal,
    require_own_device,
)
from hvdtrain.config import EffnetConfig, parse, scaled
from hvdtrain.divergence import SpikeWatch, parameter_hashes, weights_hash
from hvdtrain.events import Column
from hvdtrain.exits import BadInput
from hvdtrain.gauges import Gauges
from hvdtrain.loop import Limits, Pictures, evaluate, train_epoch
from hvdtrain.phases import OFF, Phases, clock
from hvdtrain.reports import MOST_CURVES, Means, Report, Reports, Totals
from hvdtrain.schedule import LearningRate, scaled_lr
from hvdtrain.step import TrainingStep
from hvdtrain.torch_trace import BEFORE_STEPS, TorchTrace, unmeasured_steps
from hvdtrain.verdict import Profile, over_ranks


def main() -> None:
    """One rank, from its command line to its result."""
    comm, config = join_ranks()
    device = agreed(comm, lambda: usable_device(comm, config.precision))
    require_own_device(comm, device)
    images = load_images(comm, config)
    model = build_model(comm, config, images.classes)
    folder = make_run_folder(comm, config)

    comm.start(timeline=folder / "timeline.json" if config.timeline else None)
    phases = step_clock(comm, config, folder, device)
    training = assemble(comm, config, images, model, device, phases=phases)
    tracker = describe_run(comm, config, folder, device, training)
    exits.on_early_end(folder / "ranks" / f"rank-{comm.rank}.err", tracker.conclude)
    torch.manual_seed((config.seed << 16) + comm.rank)  # dropout differs between ranks
    bar = tqdm(total=config.epochs, unit="epoch", disable=comm.rank != 0 or not sys.stderr.isatty())
    for epoch in range(config.epochs):
        started = time.perf_counter()
        totals = Totals()
        for report in training.epoch(epoch):
            tracker.report(report)
            show_events(comm, bar, report)
            totals += report.totals
            if report.end is not None:
                tracker.conclude(report.end.reason)
                raise report.end
        train_s = time.perf_counter() - started
        note_profile(comm, tracker, phases)
        test = training.evaluate()
        metrics = tracker.epoch_done(
            epoch + 1,
            images=len(images.train),
            train_s=train_s,
            train={**asdict(totals.means()), "lr": training.lr((epoch + 1) * training.steps_per_epoch - 1)},
            test=asdict(test),
        )
        show(comm, bar, epoch, config.epochs, metrics)
    phases.close()
    show_profile(comm, bar, tracker, note_profile(comm, tracker, phases))
    bar.close()
    conclude(comm, tracker, model)


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

    def epoch(self, epoch: int) -> Iterator[Report]:
        """Train on every image once; all ranks go through the reports together."""
        return train_epoch(
            self.step,
            self.images,
            self.pictures,
            epoch=epoch,
            seed=self.config.seed,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            lr=self.lr,
            average=self.average,
            limits=self.limits,
            spikes=self.spikes,
            reports=self.reports,
            device=self.device,
        )

    def evaluate(self) -> Means:
        """The test split, with the moving average of the weights if there is one."""
        return evaluate(
            self.step.model if self.average is None else self.average.module,
            self.images,
            self.pictures,
            self.step.comm,
            batch=self.micro_batch,
            precision=self.config.precision,
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


def join_ranks() -> tuple[Comm, EffnetConfig]:
    """Settings that all ranks have read alike, and the ranks."""
    try:
        config, bad = parse(sys.argv[1:]), None
    except BadInput as error:
        config, bad = scaled(), error  # the ranks still have to meet, to agree that they leave
    comm = connect(
        fusion_threshold_mb=config.fusion_threshold_mb, cycle_time_ms=config.cycle_time_ms, timeline=config.timeline
    )

    def usable() -> None:
        if bad is not None:
            raise bad

    agreed(comm, usable)
    settings = {f"--{name.replace('_', '-')}": str(value) for name, value in asdict(config).items()}
    versions = {f"the version of {name}": value for name, value in tracking.versions().items()}
    require_equal(comm, {**settings, **versions, "the code of hvdtrain (its SHA-256)": tracking.code_hash()})
    return comm, config


def usable_device(comm: Comm, precision: str) -> torch.device:
    """This rank's device; BadInput where it lacks the precision."""
    device = choose_device(comm)
    if precision == "fp16" and device.type == "cpu":
        raise BadInput("--precision fp16 needs a GPU: use bf16 or fp32 on CPUs")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(f"--precision bf16: {torch.cuda.get_device_name(device)} has no bf16, use fp16 or fp32")
    return device


def load_images(comm: Comm, config: EffnetConfig) -> data.Images:
    """The data set, downloaded by one rank of each host while the others wait."""
    agreed(comm, lambda: data.fetch(config.data, config.data_dir) if comm.local_rank == 0 else None)

    def load() -> data.Images:
        images = data.load(
            config.data,
            config.data_dir,
            height=models.image_size(config.model),
            rank=comm.rank,
            size=comm.size,
            workers=max(1, cores_together(comm.local_size) // comm.local_size),
        )
        share = len(images.train) // comm.size
        micro_batch = images_at_a_time(config, comm.size)
        if share < 1 or len(images.test) < 1:
            raise BadInput(
                f"--data {config.data} has {len(images.train)} training and {len(images.test)} test images for "
                f"{comm.size} ranks: give more images or start fewer ranks"
            )
        if micro_batch * config.accumulate_steps > share:
            given = f"--batch-size-per-rank {micro_batch}"
            given += f" x --accumulate-steps {config.accumulate_steps}" if config.accumulate_steps > 1 else ""
            if config.global_batch_size is not None:
                given = f"{micro_batch * config.accumulate_steps} of --global-batch-size {config.global_batch_size}"
            raise BadInput(
                f"{given} is more than a rank's share of {share} images "
                f"({len(images.train)} over {comm.size} ranks): lower it, or start fewer ranks"
            )
        steps = config.epochs * math.ceil(len(images.train) / (micro_batch * config.accumulate_steps * comm.size))
        if config.torch_profile is not None and config.torch_profile + BEFORE_STEPS > steps:
            raise BadInput(
                f"--torch-profile {config.torch_profile} after {BEFORE_STEPS} steps of warm-up is more than the run's "
                f"{steps} steps: lower it, or give more --epochs"
            )
        return images

    images = agreed(comm, load)
    require_equal(comm, {"the number of training images": len(images.train)})
    return images


def images_at_a_time(config: EffnetConfig, ranks: int) -> int:
    """The images that a rank takes through the model at a time; BadInput where the ranks do not divide the batch."""
    if config.global_batch_size is None:
        each = config.batch_size_per_rank
    else:
        each, rest = divmod(config.global_batch_size, ranks * config.accumulate_steps)
        if rest or not each:
            parts = ranks * config.accumulate_steps
            near = max(1, round(config.global_batch_size / parts)) * parts
            raise BadInput(
                f"--global-batch-size {config.global_batch_size} cannot be divided by {ranks} ranks x "
                f"--accumulate-steps {config.accumulate_steps}: {near} can"
            )
    if config.sync_bn and each < 2:
        raise BadInput("--sync-bn with a batch of 1 per rank leaves nothing to normalise: use at least 2")
    return each


def build_model(comm: Comm, config: EffnetConfig, classes: int) -> EfficientNet:
    """The model, initialised alike on all ranks, with pretrained weights if asked for."""

    def build() -> EfficientNet:
        torch.manual_seed(config.seed)
        model = models.build(
            config.model,
            classes=classes,
            stem_stride=config.stem_stride,
            dropout=config.dropout,
            stochastic_depth=config.stochastic_depth,
        )
        if config.pretrained is not None:
            models.load_weights(model, models.pretrained_weights(config.model, config.pretrained), config.pretrained)
        return model

    if config.pretrained == "hub":  # one download per host
        agreed(comm, lambda: models.pretrained_weights(config.model, "hub") if comm.local_rank == 0 else None)
    return agreed(comm, build)


def make_run_folder(comm: Comm, config: EffnetConfig) -> Path:
    """An empty run folder, the same on all ranks."""
    job = os.environ.get("HVDLAUNCH_JOB") or datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    name = config.run or comm.gather(job)[0]
    folder = config.runs_dir / config.experiment / name
    agreed(comm, lambda: tracking.prepare(folder, overwrite=config.overwrite) if comm.rank == 0 else None)
    agreed(comm, lambda: tracking.share(folder))
    if comm.rank == 0:
        exits.report(run_folder=str(folder.resolve()))
    return folder


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


def describe_run(
    comm: Comm, config: EffnetConfig, folder: Path, device: torch.device, training: Training
) -> tracking.Tracker:
    """Write what is known before the first step; the tracker for what follows."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "local_rank": comm.local_rank,
        "pid": os.getpid(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    placement = [{"rank": rank, **one} for rank, one in enumerate(comm.gather(facts))]
    result = {
        "np": comm.size,
        "hosts": sorted({one["host"] for one in placement}),
        "model": config.model,
        "data": config.data,
        "recipe": config.recipe,
        "epochs": config.epochs,
        "global_batch": training.global_batch,
    }
    tracker = tracking.Tracker(folder, writes=comm.rank == 0, result=result)
    derived = {
        "global_batch": training.global_batch,
        "steps_per_epoch": training.steps_per_epoch,
        "peak_lr": training.lr.peak,
        "compression": compression(config, device),
    }
    tracker.rank_facts(comm.rank, **facts)
    environment = tracking.environment()
    tracker.describe(
        columns=columns(comm, config, derived),
        command=environment["command"],
        config={**asdict(config), "derived": derived},
        environment=environment,
        placement={"ranks": placement, "plan": json.loads(os.environ.get("HVDLAUNCH_PLAN", "null"))},
    )
    return tracker


def columns(comm: Comm, config: EffnetConfig, derived: Mapping[str, Any]) -> list[Column]:
    """The settings by which a person compares runs, the same ones for every run."""
    return [
        Column(name="ranks", value=comm.size, first=True),
        Column(name="recipe", value=config.recipe, first=True),
        Column(name="model", value=config.model, first=True),
        Column(name="global_batch", value=derived["global_batch"], first=True),
        Column(name="peak_lr", value=derived["peak_lr"], first=True),
        Column(name="optimizer", value=config.optimizer),
        Column(name="data", value=config.data),
        Column(name="epochs", value=config.epochs),
        Column(name="precision", value=config.precision),
        Column(name="compression", value=derived["compression"]),
        Column(name="sync_bn", value="yes" if config.sync_bn else "no"),
        Column(name="seed", value=config.seed),
    ]


def show_events(comm: Comm, bar: "tqdm[Any]", report: Report) -> None:
    """A line for each step that was not as it should be."""
    for step, why in report.skipped:
        say(comm, bar, f"step {step} skipped on all ranks: the {why.source} of rank {why.rank} not finite")
    for spike in report.spikes:
        jump = f"from about {spike.usual:.4g} to {spike.loss:.4g}"
        say(comm, bar, f"step {spike.step}: the loss of rank {spike.rank} jumped {jump}")


def show(comm: Comm, bar: "tqdm[Any]", epoch: int, epochs: int, metrics: dict[str, float]) -> None:
    """A line for the epoch."""
    bar.update()
    say(
        comm,
        bar,
        f"epoch {epoch + 1:>3}/{epochs}  train loss {metrics['train/loss']:.4f}  "
        f"test accuracy {metrics['eval/accuracy']:.2%}  lr {metrics['train/lr']:.4g}  "
        f"{metrics['train/images_per_s']:.0f} images/s",
    )


def note_profile(comm: Comm, tracker: tracking.Tracker, phases: Phases) -> Profile | None:
    """What the clocks of all ranks have measured so far, also for phases.json and the result."""
    profile = over_ranks(comm, phases)
    if profile is not None:
        tracker.result["profile"] = profile.summary()
        tracker.document("phases.json", profile.document())
    return profile


def show_profile(comm: Comm, bar: "tqdm[Any]", tracker: tracking.Tracker, profile: Profile | None) -> None:
    """The verdict in one line, and the picture."""
    if profile is not None and comm.rank == 0:
        tracker.picture("phases", phase_picture.draw(profile), tracker.result["steps"])
        say(comm, bar, profile.verdict.sentence)


def say(comm: Comm, bar: "tqdm[Any]", line: str) -> None:
    """Rank 0 prints, above the bar if there is one."""
    if comm.rank != 0:
        return
    if bar.disable:
        print(line, flush=True)
    else:
        bar.write(line)


def conclude(comm: Comm, tracker: tracking.Tracker, model: nn.Module) -> None:
    """Each rank's last facts, the result, and the last line."""
    tracker.rank_facts(comm.rank, weights_sha256=weights_hash(parameter_hashes(model)))
    tracker.conclude(tracking.FINISHED)
    if comm.rank == 0:
        result = tracker.result
        print(
            f"finished: test accuracy {result['eval_accuracy']:.2%} after {result['epochs']} epochs on {comm.size} "
            f"rank{'s' if comm.size > 1 else ''}, {result['wall_time_s']:.0f} s, "
            f"{result['train_images_per_s']:.0f} images/s; {tracker.folder}",
            flush=True,
        )


if __name__ == "__main__":
    exits.run(main)
