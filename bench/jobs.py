"""What a run puts together before its first step, for benches that take the steps themselves."""

from collections.abc import Callable

import torch
from torch import nn

from hvdtrain.core.blocks import Blocks, Cuts
from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.step import Step
from hvdtrain.core.task import Task
from hvdtrain.feed.feed import Split
from hvdtrain.feed.order import batch_sizes
from hvdtrain.loop.draft import Job
from hvdtrain.program import assembly
from hvdtrain.program.join import horovod_fusion_mb
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.device import share_cores


def ranks_of(settings: Settings) -> Comm:
    """All ranks, before Horovod starts."""
    comm = connect(fusion_threshold_mb=horovod_fusion_mb(settings), cycle_time_ms=settings.cycle_time_ms)
    share_cores(comm)
    return comm


def job_of(
    comm: Comm,
    settings: Settings,
    device: torch.device,
    *,
    model: nn.Module,
    task: Task,
    train: Split,
    blocks: Blocks | None = None,
    phases: Phases = OFF,
    give_values: Callable[[nn.Module], None] | None = None,
) -> Job:
    """This model on this split, for the epochs of the settings."""
    sizes = batch_sizes(settings, samples=len(train), ranks=comm.data.size)
    return Job(
        comm=comm,
        device=device,
        model=model,
        task=task,
        train=train,
        cuts=Cuts(blocks=blocks),
        sizes=sizes,
        steps=settings.epochs * sizes.steps_per_epoch,
        precision=settings.precision,
        phases=phases,
        give_values=give_values,
    )


def step_of(settings: Settings, job: Job, *, lr: float) -> Step:
    """The step of a run, with its model on the device; Horovod has started."""
    return assembly.build_step(settings, job, assembly.place(settings, job), lr=lr)
