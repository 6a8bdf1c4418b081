"""Builds the step of a run and its checkpoints."""

import math
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.checkpoint.files import pack
from hvdtrain.checkpoint.settings import measured_interval
from hvdtrain.checkpoint.state import OWN, State
from hvdtrain.core.layout import Layout
from hvdtrain.core.model.equal import start_equal
from hvdtrain.core.step import Slots, Step
from hvdtrain.insight.tracking.windows import WindowWriter
from hvdtrain.loop.draft import Draft, Job
from hvdtrain.loop.hooks import Hook
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.own_state import OwnState
from hvdtrain.loop.reports import Reports
from hvdtrain.loop.save_points import AgreedSavePoints
from hvdtrain.parallel.sync.compression import Uncompressed
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.comm import Comm
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import average_of_run
from hvdtrain.recipe.own import own_optimizer, peak_lr, require_schedule
from hvdtrain.recipe.schedule import LearningRate, learning_rate
from hvdtrain.settings.group import methods
from hvdtrain.settings.safety.exits import BadInput


def arrange(settings: Settings, job: Job) -> Layout:
    """Change the model on the host as the features require; return its layout."""
    where = Layout()
    for place_part in methods(settings, "place"):
        where = place_part(job) or where
    return where


def place(settings: Settings, job: Job) -> Layout:
    """Arrange the model, move it to the device, and make it equal on all ranks."""
    where, model = arrange(settings, job), job.model
    model.to(job.device)
    start_equal(job.comm.data, model)
    model.to(memory_format=job.task.memory_format)
    return where


def build_step(settings: Settings, job: Job, where: Layout, *, lr: float) -> Step:
    """Build the step for a placed model; features fill its slots."""
    model = job.model
    average = average_of_run(model, settings, steps_per_epoch=job.sizes.steps_per_epoch, steps=job.steps)
    if settings.compile:  # compiles the average too: it is evaluated, and copying does not keep the compilation
        where.compile([model] if average is None else [model, average.module])
    if job.optimizer is not None:
        optimizer = own_optimizer(job.optimizer, model)
    else:
        groups = optim.parameter_groups(model, settings.weight_decay, decay_all=settings.decay_all)
        optimizer = optim.BUILD[settings.optimizer](groups, lr)
    scaler = GradScaler(job.device.type, enabled=settings.precision == "fp16")
    how = settings.compression_on(job.device.type).build(
        job.comm.data,
        model,
        loss_is_scaled=settings.precision == "fp16",
        reducer=settings.reducer or "bucket",
        groups=settings.fusion_groups,
        bucket_mb=settings.sent_at_once_mb or 0.0,
        is_sharded=settings.shard_optimizer,
    )
    draft = Draft(job=job, where=where, optimizer=optimizer, scaler=scaler, average=average, how=how)
    for fill in methods(settings, "fill"):
        fill(draft)
    return Step(
        model=model,
        task=job.task,
        optimizer=optimizer,
        slots=Slots(comm=job.comm, how=how, where=where, when=draft.when, witnesses=draft.witnesses),
        scaler=scaler,
        average=average,
        precision=settings.precision,
        clip_value=settings.clip_value,
        clip_norm=settings.clip_norm or None,
        phases=job.phases,
    )


def gradient_bytes(settings: Settings, job: Job) -> int:
    """Return the bytes of the gradients that a rank sends at each step, with the run's compression."""
    sent = settings.compression_on(job.device.type).sent_bytes(job.model)
    if settings.shard_optimizer:  # instead of the second half of an all-reduce it sends parameters in fp32
        if not settings.sent_at_once_mb:  # the sums are whole, see ShardedSync
            sent *= 2
        return (sent + Uncompressed("none").sent_bytes(job.model)) // 2
    return sent


def derive(
    settings: Settings, job: Job, where: Layout, *, test_samples: int, parameters: int, peak_lr: float
) -> dict[str, Any]:
    """Return the values derived from the settings and the job, for config.json."""
    derived = {
        **asdict(job.sizes),
        "steps": job.steps,
        "peak_lr": peak_lr,
        "compression": settings.compression_on(job.device.type).name,
        "train_samples": len(job.train),
        "test_samples": test_samples,
        "parameters": parameters,
        "fusion_threshold_mb": settings.sent_at_once_mb,
        **where.metadata,
        **({} if job.optimizer_name is None else {"optimizer": job.optimizer_name}),
    }
    if job.length_option != "--epochs":
        derived |= {"max_steps": job.steps, "epochs": math.ceil(job.steps / job.sizes.steps_per_epoch)}
    if job.comm.replica.size > 1:
        return derived
    tensors = sum(parameter.requires_grad for parameter in job.model.parameters())
    return derived | {"gradient_bytes": gradient_bytes(settings, job), "gradient_tensors": tensors}


def tuning_hooks(settings: Settings, job: Job, *, batch: float) -> list[Hook]:
    """Return the hooks that `hvdlaunch tune` reads, if it has started this training."""
    if (file := os.environ.get("HVDLAUNCH_WINDOWS")) is None:
        return []
    rounds = getattr(settings.rounds, "steps", 1)
    return [WindowWriter(Path(file), job.comm, job.phases, batch=batch, epoch_samples=len(job.train), every=rounds)]


def state_of(step: Step, limits: Limits, reports: Reports, *, seed: int, own: OwnState | None = None) -> State:
    """Return the parts of a training that a checkpoint holds."""
    witnesses = {witness.name: witness for witness in step.slots.witnesses if witness.name}
    is_apart = step.slots.comm.sync_group.size < step.slots.comm.size  # groups that step on their own differ
    own_states = {name: witness for name, witness in witnesses.items() if is_apart or witness.is_own}
    shared = {name: witness for name, witness in witnesses.items() if name not in own_states}
    return State(
        comm=step.slots.comm,
        device=step.device,
        seed=seed,
        model=step.model,
        average=step.average if isinstance(step.average, nn.Module) else None,
        optimizer=step.optimizer,
        shared={"scaler": step.scaler, "limits": limits, OWN: own or OwnState(), **shared},
        per_rank={"spikes": reports.spikes, "sync": step.slots.how, **own_states},
        where=step.slots.where,
        how=step.slots.how,
        averaged_buffers=step.task.averaged_buffers,
    )


def rate_of(settings: Settings, job: Job) -> LearningRate:
    """Return the learning rate of each step."""
    return learning_rate(
        settings,
        samples=len(job.train),
        steps_per_epoch=job.sizes.steps_per_epoch,
        max_steps=None if job.length_option == "--epochs" else job.steps,
        own_peak=job.peak_lr,
        own=job.schedule,
    )


def with_own_recipe(
    settings: Settings,
    job: Job,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    schedule: Callable[[float], float] | None,
) -> Job:
    """Return the job with a program's own optimizer and schedule, which are tried; BadInput if they cannot train."""
    if schedule is not None:
        require_schedule(schedule)
    if optimizer is None:
        return replace(job, schedule=schedule)
    if settings.lr is not None:
        raise BadInput(f"--lr {settings.lr:g}: the program's own optimizer has its rates. Leave it out.")
    made = own_optimizer(optimizer, job.model)
    try:
        pack("optimizer", made.state_dict())
    except TypeError as error:  # it has an option that is a number of numpy
        raise BadInput(f"optimizer {type(made).__name__}: {error}. Pass numbers of Python.") from error
    return replace(
        job, optimizer=optimizer, peak_lr=peak_lr(made), schedule=schedule, optimizer_name=type(made).__name__
    )


class AtEnd(Hook):
    """Calls the program's function after the last epoch."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def trained(self, position: object) -> None:
        self._function()


def make_save_points(settings: Settings, comm: Comm, stop_requested: threading.Event) -> AgreedSavePoints:
    """Return when to save, by the interval of the settings or the one that is measured."""
    every_s, next_s = settings.checkpoint_every_s, None
    if settings.checkpoint_every == "auto":
        next_s = measured_interval(ranks=comm.size, failures_per_gpu_hour=settings.failures_per_gpu_hour)
    return AgreedSavePoints(
        comm, stop_requested, every_s=every_s, every_steps=settings.checkpoint_every_steps, next_s=next_s
    )
