"""How long an epoch will take on CPUs, measured on a few samples before the first step."""

import os
import time
from collections.abc import Callable

import torch

from hvdtrain.core.step import Step
from hvdtrain.elastic.newcomers import read_invitation
from hvdtrain.loop.draft import Job
from hvdtrain.program.fit import Room, Trial
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.comm import Comm

LONG_S = 600.0  # shorter epochs are not announced
ENOUGH_S = 1.0  # of a measurement


def long_epoch(settings: Settings, job: Job, step: Step) -> str | None:
    """Return a note if an epoch will take long on CPUs; it is not known if files are read or ranks hold parts."""
    is_joining = read_invitation(os.environ) is not None
    if job.device.type != "cpu" or job.train.reads_files or step.slots.where.ranks > 1 or is_joining:
        return None
    last, share = len(job.train) - 1, len(job.train) / job.comm.data.size
    trial = Trial(step, job, Room(job.comm, is_host=True))
    epoch_s = long_epoch_s(
        job.comm, share, job.sizes.micro_batch, lambda samples: trial.run(torch.linspace(0, last, samples).long())
    )
    if epoch_s is None:
        return None
    remedy = settings.FOR_CPUS or "Train on GPUs, with a smaller model, or on fewer samples."
    return f"an epoch will take about {in_words(epoch_s)} on these CPUs. {remedy}"


def long_epoch_s(comm: Comm, share: float, most: int, run: Callable[[int], object]) -> float | None:
    """Return about how many seconds an epoch takes by the slowest rank, without communication; None if it is short.

    `run` computes that many samples, at most `most`; all ranks call it together, because they may share cores. `share`
    are a rank's samples of an epoch. The first time includes what is done only once, so it is believed if it is short.
    """
    samples, is_first = min(2, most), True  # batch norm needs two
    while True:
        began = time.perf_counter()
        run(samples)
        took_s = float(max(comm.allgather(time.perf_counter() - began)))
        if (epoch_s := took_s / samples * share) < LONG_S:
            return None
        if not is_first and (took_s >= ENOUGH_S or samples == most):
            return epoch_s
        samples, is_first = samples if is_first else min(2 * samples, most), False


def in_words(seconds: float) -> str:
    """Format a long duration, such as 3 hours."""
    unit, unit_s = next(
        ((unit, s) for unit, s in (("days", 86_400), ("hours", 3600)) if seconds >= 2 * s), ("minutes", 60)
    )
    return f"{seconds / unit_s:.0f} {unit}"
