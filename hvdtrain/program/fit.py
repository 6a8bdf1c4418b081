"""Trials before the first step: the largest batch that fits on all ranks, and how long an epoch will take on CPUs."""

import math
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from hvdtrain.core.layout import require_gradient
from hvdtrain.core.model.state import unchanged
from hvdtrain.core.phases import OFF
from hvdtrain.core.random_state import random_state, restore_random_state
from hvdtrain.core.step import Step
from hvdtrain.insight.tracking.gauges import process_peaks
from hvdtrain.loop.draft import Job
from hvdtrain.loop.feed.feed import raw_batches
from hvdtrain.program.checks import require_dense
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.guard import is_out_of_memory
from hvdtrain.settings.safety.limits import memory_bytes

HEADROOM = 1.25  # a size fits if this multiple of it does, which leaves a margin
HOST_SHARE = 0.8  # of a host's memory, for ranks on CPUs: beyond its limit the kernel kills without an exception
LONG_S = 600.0  # shorter epochs are not announced
TRIED = 8  # samples of the batch that is measured for it
# Multiples of the trained parameters, allocated in the first step: gradient buffers, which ranks that divide the
# optimizer's state have already, and this state of all ranks.
_GRADIENTS, _STATE = 1, 2


def passes_for(share: int, most: int) -> int:
    """Return the fewest equal parts of a rank's `share` of samples with at most `most` samples each."""
    return next(parts for parts in range(math.ceil(share / most), share + 1) if share % parts == 0)


def most_that_fit(comm: Comm, share: int, fits: Callable[[int], bool]) -> int:
    """Return the most samples, 1, 2, 4, ... up to `share`, that fit on all ranks, which try each size together.

    Raise BadInput on all ranks if not even one sample fits.
    """
    most, size = 0, 1
    while most < share:
        answers = comm.allgather([fits(size), socket.gethostname()])
        late = next(((rank, host) for rank, (has_room, host) in enumerate(answers) if not has_room), None)
        if late is not None and not most:
            rank, host = late
            raise BadInput(
                f"--batch-size-per-rank auto: not even one sample fits into the memory of rank {rank} on {host}. Pass "
                "--recompute or a smaller model, or start fewer ranks on a host."
            )
        if late is not None:
            break
        most, size = size, min(2 * size, share)
    return most


class Trial:
    """Runs trial batches through the model, and restores weights, statistics and random numbers."""

    def __init__(self, step: Step, job: Job, room: "Room") -> None:
        self._step, self._job, self._room = step, job, room
        self._trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]

    def fits(self, samples: int) -> bool:
        """Return whether HEADROOM times as many samples fit."""
        samples = math.ceil(HEADROOM * samples)
        shards = self._step.slots.how.shards
        multiple = _GRADIENTS * (shards == 1) + _STATE / shards
        state_bytes = math.ceil(multiple * sum(parameter.nbytes for parameter in self._trained))
        if not self._room.has(samples, state_bytes):
            return False
        dearest = self._job.task.cost(torch.arange(len(self._job.train))).argsort(descending=True, stable=True)
        try:
            self.run(dearest[torch.arange(samples) % len(dearest)], state_bytes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            if self._job.device.type == "cuda":
                torch.cuda.empty_cache()
        self._room.took(samples)
        return True

    def run(self, wanted: Tensor, state_bytes: int = 0) -> None:
        """Run these samples, (N,), forward and backward while `state_bytes` are taken; restore what that changes."""
        step, random = self._step, random_state()
        phases, step.phases = step.phases, OFF
        witnesses, step.slots.witnesses = step.slots.witnesses, []  # this is not a step
        # cuDNN would try its kernels for each size.
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        step.modes.restore()
        try:
            with unchanged(step.model.modules()):
                self._take(wanted, state_bytes)
        finally:
            step.phases, step.slots.witnesses = phases, witnesses
            torch.backends.cudnn.benchmark = benchmark
            restore_random_state(random)

    def _take(self, wanted: Tensor, state_bytes: int) -> None:
        job, step = self._job, self._step
        state = torch.empty(state_bytes, dtype=torch.uint8, device=job.device)  # takes host memory only when written
        [(placed, raw)] = raw_batches(job.train, [wanted], job.device, None)
        batch = job.task.prepare(raw, placed, None)
        with torch.compiler.set_stance("force_eager"):  # else each size would be compiled
            with torch.autocast(job.device.type, enabled=False):
                require_gradient(own := step.slots.where.forward(step, batch).loss)
                loss = step.scaler.scale(own)
            # bypasses the hooks that communicate
            gradients = torch.autograd.grad(loss, self._trained, allow_unused=True)
        require_dense(step.model, dict(zip(self._trained, gradients, strict=True)))
        del state


class Room:
    """Predicts from smaller trials whether a batch fits into a host's memory; a GPU raises an error instead."""

    def __init__(self, comm: Comm, *, is_host: bool, root: Path = Path("/")) -> None:
        self._peak_bytes = _peak_bytes()
        self._taken: list[tuple[int, float]] = []  # samples, and the process's memory with them
        began, free = psutil.Process().memory_info(), psutil.virtual_memory().available
        limit = min(memory_bytes(root), began.rss * comm.local_size + free) / comm.local_size
        addresses, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v, or h_vmem of Grid Engine
        if addresses != resource.RLIM_INFINITY:
            limit = min(limit, began.rss + addresses - began.vms)
        self.limit_bytes = HOST_SHARE * limit if is_host else math.inf

    def has(self, samples: int, state_bytes: int) -> bool:
        """Return whether a trial with this number of samples fits, including what the first step allocates."""
        return self.expected_bytes(samples) + state_bytes <= self.limit_bytes

    def expected_bytes(self, samples: int) -> float:
        """Return the expected memory of this process with this number of samples; 0 before the second trial."""
        if len(self._taken) < 2:
            return 0.0
        (fewer, before), (last, now) = self._taken[-2:]
        return now + max(0.0, now - before) / (last - fewer) * (samples - last)

    def took(self, samples: int) -> None:
        """Record a trial. Memory that is freed stays with the process (safety.memory); otherwise its peak is used."""
        peak, resident = _peak_bytes(), float(psutil.Process().memory_info().rss)
        self._taken.append((samples, max(resident, peak) if peak > self._peak_bytes else resident))


def _peak_bytes() -> float:
    return process_peaks(torch.device("cpu"))["resident_mib"] * 2**20


def long_epoch(settings: Settings, job: Job, step: Step) -> str | None:
    """Return a note if an epoch will take long on CPUs; it is not known if files are read or ranks hold parts."""
    if job.device.type != "cpu" or job.train.reads_files or job.comm.replica.size > 1:
        return None
    last, share = len(job.train) - 1, len(job.train) / job.comm.data.size
    trial, samples = Trial(step, job, Room(job.comm, is_host=True)), min(TRIED, job.sizes.micro_batch)
    epoch_s = long_epoch_s(job.comm, share / samples, lambda: trial.run(torch.linspace(0, last, samples).long()))
    if epoch_s is None:
        return None
    remedy = settings.FOR_CPUS or "Train on GPUs, with a smaller model, or on fewer samples."
    return f"an epoch will take about {epoch_s / 60:.0f} minutes on these CPUs. {remedy}"


def long_epoch_s(comm: Comm, batches: float, run: Callable[[], object]) -> float | None:
    """Return about how many seconds an epoch takes by the slowest rank, without communication; None if it is short.

    `run` computes a batch; all ranks call it together, because they may share cores. The first time includes what is
    done only once, so it is believed only if it is short.
    """
    for _ in ("the first time", "again"):
        began = time.perf_counter()
        run()
        epoch_s = float(max(comm.allgather(time.perf_counter() - began))) * batches
        if epoch_s < LONG_S:
            return None
    return epoch_s
