"""Predictions for each size: speed, cost and failures."""

import math
from dataclasses import dataclass, field

from launch.errors import CommandError
from launch.estimate import failures
from launch.estimate.allreduce import cheapest, costs
from launch.estimate.failures import Faults, Outlook
from launch.estimate.hardware import Hardware
from launch.estimate.helps import Help, helps
from launch.estimate.inputs import Known
from launch.estimate.step import LARGEST_POINT, Job, Step, base, buckets, is_extrapolated, predict

FILLED = 0.9  # of a GPU's memory for a model, an assumption: the rest is the driver's, NCCL's and what is fragmented


@dataclass(frozen=True, kw_only=True)
class CriticalBatch:
    """The global batch above which more GPUs do not reduce the number of steps."""

    samples: float
    source: str


_UNMEASURED = "published, not measured on this training"
# By what is trained, orders of magnitude; a user's own number is better.
CRITICAL = {
    "cifar10": CriticalBatch(samples=1_000, source=f"gradient noise scale of McCandlish 2018; {_UNMEASURED}"),
    "imagenet": CriticalBatch(samples=8_000, source=f"ResNet-50, Shallue 2019 and McCandlish 2018; {_UNMEASURED}"),
    "bert": CriticalBatch(samples=32_000, source=f"with LAMB, You 2020; {_UNMEASURED}"),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """The quantities to predict for each size."""

    gpus: tuple[int, ...]
    price_per_gpu_hour: float | None = None
    epochs: float | None = None
    samples_per_epoch: int | None = None
    hours: float | None = None  # of a run; None: determined by its epochs
    deadline_h: float | None = None
    critical: CriticalBatch | None = None
    save_s: float | None = None
    faults: Faults = field(default_factory=Faults)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The prediction for one number of GPUs; unknown numbers are None, `why_not` explains a missing speed."""

    gpus: int
    hosts: int
    step: Step | None
    why_not: str | None
    is_band: bool  # above LARGEST_POINT GPUs only the band is shown
    is_extrapolated: bool
    efficiency: float | None  # relative to the speed per GPU of the smallest measured size
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    energy_kwh: float | None
    algorithm_why: str
    helps: tuple[Help, ...]
    fits: bool | None
    stages: int | None  # number that makes it fit; None if it fits already or cannot fit
    failures: Outlook | None
    batch: int
    past_critical: bool | None


def sizes(known: Known, hardware: Hardware, question: Question) -> tuple[Size, ...]:
    """Predict each requested size, smallest first; CommandError for an invalid one."""
    largest = max(one.gpus for one in known.measured)
    if (least := min(question.gpus)) < largest:
        raise CommandError(
            f"--gpus {least}: fewer than the {largest} GPUs that were measured. Pass sizes of at least {largest}."
        )
    over = [gpus for gpus in question.gpus if gpus > hardware.gpus_per_host]
    if over and hardware.link_gb_per_s is None:
        raise CommandError(
            f"--gpus {over[0]}: hosts have {hardware.gpus_per_host} GPUs, and the network between them is not known. "
            "Pass --link, for example 8x200gbit or 100mbit, or --machine."
        )
    return tuple(_size(known, hardware, question, gpus) for gpus in sorted(question.gpus))


def _size(known: Known, hardware: Hardware, question: Question, gpus: int) -> Size:
    job, told = known.job, base(known.measured, hardware, gpus)
    least = min(known.measured, key=lambda one: one.gpus)
    why_not = None
    if gpus > hardware.gpus_per_host and max(one.gpus for one in known.measured) == 1 and not told.is_dry_run:
        why_not = "one rank does not show how hosts scale: measure 2 or more"
    step = None if why_not else predict(job, hardware, known.measured, gpus)
    needed_h = hours(step, question)
    gpu_hours = None if needed_h is None else gpus * needed_h
    fits, stages = _memory(known, hardware)
    lasting_h = question.hours or needed_h
    batch = gpus * job.batch_per_gpu
    return Size(
        gpus=gpus,
        hosts=math.ceil(gpus / hardware.gpus_per_host),
        step=step,
        why_not=why_not,
        is_band=gpus > LARGEST_POINT,
        is_extrapolated=is_extrapolated(hardware, told, gpus),
        efficiency=None if step is None else step.samples_per_s / gpus / (least.samples_per_s / least.gpus),
        hours=needed_h,
        gpu_hours=gpu_hours,
        cost=None
        if gpu_hours is None or question.price_per_gpu_hour is None
        else gpu_hours * question.price_per_gpu_hour,
        energy_kwh=None if gpu_hours is None or known.watts_per_gpu is None else gpu_hours * known.watts_per_gpu / 1000,
        algorithm_why="" if step is None else _why(job, hardware, gpus),
        helps=() if step is None else helps(job, hardware, step),
        fits=fits,
        stages=stages,
        failures=None
        if lasting_h is None
        else failures.outlook(question.faults, gpus=gpus, hours=lasting_h, save_s=_save_s(known, question)),
        batch=batch,
        past_critical=None if question.critical is None else batch > question.critical.samples,
    )


def _save_s(known: Known, question: Question) -> float | None:
    return known.save_s if question.save_s is None else question.save_s


def hours(step: Step | None, question: Question) -> float | None:
    """Return the hours of the training; None if epochs or speed are unknown, and above LARGEST_POINT."""
    if step is None or step.gpus > LARGEST_POINT or question.epochs is None or question.samples_per_epoch is None:
        return None
    return question.epochs * question.samples_per_epoch / step.samples_per_s / 3600


def _memory(known: Known, hardware: Hardware) -> tuple[bool | None, int | None]:
    """Return whether a dry run's memory fits a GPU, and the fewest equal stages that do; measured runs have fitted."""
    if known.memory_bytes is None or hardware.memory_gb is None:
        return (None, None) if known.memory_bytes is not None else (True, None)
    room = FILLED * hardware.memory_gb * 1e9
    stages = math.ceil(known.memory_bytes / room)
    return stages == 1, stages if 1 < stages <= hardware.gpus_per_host else None


def _why(job: Job, hardware: Hardware, gpus: int) -> str:
    """Which all-reduce wins for one bucket, and against what."""
    size = buckets(job)[-1]
    options = costs(hardware, gpus)
    best = cheapest(options, size)
    times = ", ".join(f"{cost.algorithm} {_duration(cost.seconds(size))}" for cost in options)
    carried_s = size * best.s_per_byte
    bound = "latency" if best.latency_s > carried_s else "bandwidth"
    return f"{size / 1e6:.3g} MB at once: {times}; bound by {bound}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
