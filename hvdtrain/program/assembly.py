"""Builds the step of a run and its checkpoints, and rebuilds what depends on the number of ranks."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.checkpoint.folder import hold_again
from hvdtrain.checkpoint.interval import FIRST_S, MeasuredInterval
from hvdtrain.checkpoint.run_folder import RunFolder
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.checkpoint.state import OWN, State
from hvdtrain.core.every_step import Follower
from hvdtrain.core.layout import Layout
from hvdtrain.core.step import Slots, Step
from hvdtrain.core.task import Task
from hvdtrain.feed.order import BatchSizes, batch_sizes
from hvdtrain.loop.draft import Draft, Job
from hvdtrain.loop.hooks import Division, Hook
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.own_state import OwnState
from hvdtrain.loop.reports import Reports
from hvdtrain.loop.save_points import AgreedSavePoints
from hvdtrain.model.equal import start_equal
from hvdtrain.profiling.verdict import REMEDIES
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.comm import Comm
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage, average_of_run, horizon_steps
from hvdtrain.recipe.own import own_optimizer, peak_lr, require_schedule
from hvdtrain.recipe.schedule import LearningRate, learning_rate
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.group import methods
from hvdtrain.tracking.run import Run as Record
from hvdtrain.tracking.tracker import Measures


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
    model.to(memory_format=job.task.memory_format)  # type: ignore[call-overload]
    return where


def build_step(settings: Settings, job: Job, where: Layout, *, lr: float) -> Step:
    """Build the step for a placed model; features fill its slots."""
    model = job.model
    average = average_of_run(model, settings, steps_per_epoch=job.sizes.steps_per_epoch)
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
        clip_norm=settings.clip_norm,
        phases=job.phases,
    )


def state_of(step: Step, limits: Limits, reports: Reports, *, seed: int, own: OwnState | None = None) -> State:
    """Return the parts of a training that a checkpoint holds."""
    witnesses = {witness.name: witness for witness in step.slots.witnesses if witness.name}
    is_apart = step.slots.comm.sync_group.size < step.slots.comm.size  # groups that step on their own differ
    return State(
        comm=step.slots.comm,
        device=step.device,
        seed=seed,
        model=step.model,
        average=step.average if isinstance(step.average, nn.Module) else None,
        optimizer=step.optimizer,
        shared={"scaler": step.scaler, "limits": limits, OWN: own or OwnState(), **({} if is_apart else witnesses)},
        per_rank={"spikes": reports.spikes, "sync": step.slots.how, **(witnesses if is_apart else {})},
        where=step.slots.where,
        averaged_buffers=step.task.averaged_buffers,
    )


def measures_of(task: Task) -> Measures:
    """Return what the tracker needs to know of a task."""
    return Measures(
        unit=task.unit,
        metrics=tuple(dict.fromkeys(("loss", *task.means, task.best))),
        best_metric=task.best,
        higher_is_better=task.higher_is_better,
        remedies={**REMEDIES, **task.remedies},
    )


def rate_of(settings: Settings, job: Job, before: LearningRate | None = None) -> LearningRate:
    """Return the learning rate of each step; `before` is the one used with the previous ranks."""
    return learning_rate(
        settings,
        samples=len(job.train),
        steps_per_epoch=job.sizes.steps_per_epoch,
        max_steps=None if job.length_option == "--epochs" else job.steps,
        before=before,
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
    return replace(
        job, optimizer=optimizer, peak_lr=peak_lr(made), schedule=schedule, optimizer_name=type(made).__name__
    )


class Repartition(Hook):
    """Divides the rest of a run over the current ranks.

    If the settings name a global batch, it is kept and each rank takes more micro-batches. Otherwise the batch per rank
    is kept.
    """

    def __init__(self, settings: Settings, job: Job, rate: LearningRate, average: Follower | None) -> None:
        self._settings, self._job, self._rate, self._average = settings, job, rate, average

    def ranks_changed(self, sizes: BatchSizes) -> Division:
        settings, job = self._settings, self._job
        if settings.global_batch_size is None:
            sizes = batch_sizes(settings, samples=len(job.train), ranks=job.comm.data.size)
        if isinstance(self._average, MovingAverage):
            self._average.remember(horizon_steps=horizon_steps(settings, sizes.steps_per_epoch))
        self._rate = rate_of(settings, replace(job, sizes=sizes), before=self._rate)
        return Division(sizes=sizes, rate=self._rate)


class AtEnd(Hook):
    """Calls the program's function after the last epoch."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def trained(self, position: object) -> None:
        self._function()


def make_saves(
    settings: Settings, record: Record, folder: RunFolder, state: State, *, chosen: Mapping[str, Any]
) -> Saves:
    """Return the checkpoints of the run; `chosen` are values that the program has set for all attempts."""
    return Saves(
        state,
        folder.path / "checkpoints",
        about={**folder.about, **chosen},
        memory=record.tracker.memory,
        guard=record.tracker.guard,
        keep=settings.keep,
        newest=None if folder.resume_from is None else folder.resume_from.step,
        is_shared=folder.is_shared,
        is_elastic=settings.elastic,
        hold=lambda: None if folder.lock is None else hold_again(folder.path, folder.lock),
        faults=record.faults,
    )


def make_save_points(
    settings: Settings, record: Record, comm: Comm, *, newcomers: threading.Event | None
) -> AgreedSavePoints:
    """Return when to save, by the interval of the settings or the one that is measured."""
    every_s, next_s = settings.checkpoint_every_s, None
    if every_s == "auto":
        rate = settings.failures_per_gpu_hour
        every_s, next_s = FIRST_S, MeasuredInterval(ranks=comm.size, failures_per_gpu_hour=rate).after
    return AgreedSavePoints(
        comm,
        record.stop_requested,
        every_s=every_s,
        every_steps=settings.checkpoint_every_steps,
        newcomers=newcomers,
        next_s=next_s,
    )


def make_saver(record: Record, saves: Saves, points: AgreedSavePoints, step: Step, folder: RunFolder) -> Saver:
    """Return the hook that saves at these points, and the best weights."""
    return Saver(
        saves,
        points,
        step,
        run=folder.path.name,
        is_best=record.tracker.is_best,
        on_save=record.tracker.record_save,
        watchdog=record.watch,
    )
