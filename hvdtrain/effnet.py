"""Train an EfficientNet with Horovod.

    python -m hvdtrain.effnet --data digits --model efficientnet_tiny        one process, no MPI needed
    horovodrun -np 8 python -m hvdtrain.effnet                               one host, CIFAR-10
    horovodrun -np 16 -H one:8,two:8 python -m hvdtrain.effnet               two hosts
    mpirun -np 8 python -m hvdtrain.effnet                                   by mpirun itself

The result lies in runs/effnet/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

import json
import math
import os
import platform
import socket
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torchvision.models import EfficientNet
from tqdm import tqdm

from hvdtrain import data, exits, models, optim, tracking
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
from hvdtrain.exits import BadInput
from hvdtrain.loop import Pictures, evaluate, train_epoch
from hvdtrain.schedule import LearningRate, scaled_lr
from hvdtrain.step import TrainingStep


def main() -> None:
    """One rank, from its command line to its result."""
    comm, config = join_ranks()
    device = agreed(comm, lambda: usable_device(comm, config.precision))
    require_own_device(comm, device)
    images = load_images(comm, config)
    global_batch = config.batch_size_per_rank * config.accumulate_steps * comm.size
    steps_per_epoch = math.ceil(len(images.train) / global_batch)
    require_equal(comm, {"the number of training images": len(images.train), "the steps of an epoch": steps_per_epoch})
    model = build_model(comm, config, images.classes)
    folder = make_run_folder(comm, config)

    comm.start()
    model = model.to(device)
    comm.broadcast_(model)
    model = model.to(memory_format=memory_format(config))
    if config.compile:
        model.compile()
    lr = learning_rate(config, global_batch, steps_per_epoch)
    compression = config.compression or ("fp16" if device.type == "cuda" else "none")
    step = TrainingStep(
        model=model,
        optimizer=optim.build(
            config.optimizer, optim.parameter_groups(model, config.weight_decay, decay_all=config.decay_all), lr.peak
        ),
        sync=comm.gradient_sync(model, compression=compression),
        scaler=GradScaler(device.type, enabled=config.precision == "fp16"),
        precision=config.precision,
        label_smoothing=config.label_smoothing,
        clip_value=config.clip_value,
        clip_norm=config.clip_norm,
    )
    horizon_steps = config.ema_epochs * steps_per_epoch
    average = optim.moving_average(model, horizon_steps=horizon_steps) if config.ema_epochs else None
    evaluated = model if average is None else average.module
    pictures = pictures_for(config, images, device)

    tracker = describe_run(comm, config, folder, device, {"peak_lr": lr.peak, "compression": compression})
    exits.on_early_end(folder / "ranks" / f"rank-{comm.rank}.err", tracker.conclude)
    torch.manual_seed((config.seed << 16) + comm.rank)  # dropout differs between ranks
    bar = tqdm(total=config.epochs, unit="epoch", disable=comm.rank != 0 or not sys.stderr.isatty())
    for epoch in range(config.epochs):
        started = time.perf_counter()
        train, skipped = train_epoch(
            step,
            images,
            pictures,
            comm,
            epoch=epoch,
            seed=config.seed,
            global_batch=global_batch,
            micro_batch=config.batch_size_per_rank,
            lr=lr,
            average=average,
            device=device,
        )
        train_s = time.perf_counter() - started
        batch, precision = config.batch_size_per_rank, config.precision
        test = evaluate(evaluated, images, pictures, comm, batch=batch, precision=precision, device=device)
        metrics = tracker.epoch_done(
            steps=steps_per_epoch,
            images=len(images.train),
            train_s=train_s,
            skipped=skipped,
            train={**asdict(train), "lr": lr((epoch + 1) * steps_per_epoch - 1)},
            test=asdict(test),
        )
        show(comm, bar, epoch, config.epochs, metrics)
    bar.close()
    conclude(comm, tracker, model)


def join_ranks() -> tuple[Comm, EffnetConfig]:
    """Settings that all ranks have read alike, and the ranks."""
    try:
        config, bad = parse(sys.argv[1:]), None
    except BadInput as error:
        config, bad = scaled(), error  # the ranks still have to meet, to agree that they leave
    comm = connect(fusion_threshold_mb=config.fusion_threshold_mb, cycle_time_ms=config.cycle_time_ms)

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
        if share < 1 or len(images.test) < 1:
            raise BadInput(
                f"--data {config.data} has {len(images.train)} training and {len(images.test)} test images for "
                f"{comm.size} ranks: give more images or start fewer ranks"
            )
        if config.batch_size_per_rank * config.accumulate_steps > share:
            times = f" x --accumulate-steps {config.accumulate_steps}" if config.accumulate_steps > 1 else ""
            raise BadInput(
                f"--batch-size-per-rank {config.batch_size_per_rank}{times} is more than a rank's share of {share} "
                f"images ({len(images.train)} over {comm.size} ranks): lower it, or start fewer ranks"
            )
        return images

    return agreed(comm, load)


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
    name = config.run or comm.gather(datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))[0]
    folder = config.runs_dir / config.experiment / name
    agreed(comm, lambda: tracking.prepare(folder, overwrite=config.overwrite) if comm.rank == 0 else None)
    (folder / "ranks").mkdir(parents=True, exist_ok=True)  # on hosts that do not share the folder
    return folder


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
    comm: Comm, config: EffnetConfig, folder: Path, device: torch.device, derived: dict[str, Any]
) -> tracking.Tracker:
    """Write what is known before the first step; the tracker for what follows."""
    facts = {
        "rank": comm.rank,
        "host": socket.gethostname(),
        "local_rank": comm.local_rank,
        "pid": os.getpid(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }
    tracking.write_json(folder / "ranks" / f"rank-{comm.rank}.json", facts)
    placement = comm.gather(facts)
    global_batch = config.batch_size_per_rank * config.accumulate_steps * comm.size
    result = {
        "np": comm.size,
        "hosts": sorted({one["host"] for one in placement}),
        "model": config.model,
        "data": config.data,
        "recipe": config.recipe,
        "epochs": config.epochs,
        "global_batch": global_batch,
    }
    tracker = tracking.Tracker(folder, writes=comm.rank == 0, result=result)
    tracker.describe(
        config={**asdict(config), "derived": derived}, environment=tracking.environment(), placement=placement
    )
    return tracker


def show(comm: Comm, bar: "tqdm[Any]", epoch: int, epochs: int, metrics: dict[str, float]) -> None:
    """One line per epoch, above the bar if there is one."""
    if comm.rank != 0:
        return
    line = (
        f"epoch {epoch + 1:>3}/{epochs}  train loss {metrics['train/loss']:.4f}  "
        f"test accuracy {metrics['eval/accuracy']:.2%}  lr {metrics['train/lr']:.4g}  "
        f"{metrics['train/images_per_s']:.0f} images/s"
    )
    if bar.disable:
        print(line, flush=True)
    else:
        bar.write(line)
        bar.update()


def conclude(comm: Comm, tracker: tracking.Tracker, model: nn.Module) -> None:
    """Each rank's last facts, the result, and the last line."""
    facts = tracker.folder / "ranks" / f"rank-{comm.rank}.json"
    known = json.loads(facts.read_text())
    tracking.write_json(facts, {**known, "weights_sha256": tracking.weights_hash(model)})
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
