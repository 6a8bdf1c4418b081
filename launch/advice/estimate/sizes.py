"""Predictions for each size: speed, cost and failures."""

import math
from dataclasses import dataclass, field

from launch.advice.estimate import failures
from launch.advice.estimate.failures import FailureRates, Outlook
from launch.advice.estimate.hardware import Hardware
from launch.advice.estimate.helps import helps
from launch.advice.estimate.inputs import Known
from launch.advice.estimate.step import PredictedStep, predict
from launch.errors import CommandError

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
    faults: FailureRates = field(default_factory=FailureRates)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The prediction for one number of GPUs; numbers that are not known are None."""

    gpus: int
    hosts: int
    step: PredictedStep
    efficiency: float  # relative to the speed per GPU of the smallest measured size
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    energy_kwh: float | None
    helps: dict[str, float]  # times as fast at most, by option
    fits_memory: bool | None
    stages_to_fit: int | None  # number that makes it fit; None if it fits already or cannot fit
    failures: Outlook | None
    global_batch: int
    past_critical_batch: bool | None


def sizes(known: Known, hardware: Hardware, question: Question) -> tuple[Size, ...]:
    """Predict each requested size, smallest first; CommandError for an invalid one."""
    largest = max(one.gpus for one in known.measured)
    if (least := min(question.gpus)) < largest:
        raise CommandError(
            f"--gpus {least}: fewer than the {largest} GPUs that were measured. Pass sizes of at least {largest}."
        )
    over = [gpus for gpus in question.gpus if gpus > hardware.gpus_per_host]
    over += [one.gpus for one in known.measured if one.gpus > one.per_host]
    if over and hardware.link_gb_per_s is None:
        raise CommandError(
            f"--gpus {over[0]}: these are on several hosts, and the network between them is not known. "
            "Pass --link, for example 8x200gbit or 100mbit, or --machine."
        )
    return tuple(_size(known, hardware, question, gpus) for gpus in sorted(question.gpus))


def _size(known: Known, hardware: Hardware, question: Question, gpus: int) -> Size:
    least = min(known.measured, key=lambda one: one.gpus)
    step = predict(known.job, hardware, known.measured, gpus)
    needed_h = hours(step, question)
    lasting_h = question.hours or needed_h
    fits, stages = _memory(known, hardware, gpus)
    batch = gpus * known.job.batch_per_gpu
    return Size(
        gpus=gpus,
        hosts=math.ceil(gpus / hardware.gpus_per_host),
        step=step,
        efficiency=step.samples_per_s / gpus / (least.samples_per_s / least.gpus),
        hours=needed_h,
        gpu_hours=_product(gpus, needed_h),
        cost=_product(gpus, needed_h, question.price_per_gpu_hour),
        energy_kwh=_product(gpus, needed_h, known.watts_per_gpu, 1e-3),
        helps=helps(known.job, hardware, step),
        fits_memory=fits,
        stages_to_fit=stages,
        failures=None
        if lasting_h is None
        else failures.outlook(question.faults, gpus=gpus, hours=lasting_h, save_s=save_s(known, question)),
        global_batch=batch,
        past_critical_batch=None if question.critical is None else batch > question.critical.samples,
    )


def _product(*factors: float | None) -> float | None:
    """Return the product; None if a factor is not known."""
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def save_s(known: Known, question: Question) -> float | None:
    """Return how long a checkpoint holds the training, as passed or measured."""
    return known.save_s if question.save_s is None else question.save_s


def hours(step: PredictedStep, question: Question) -> float | None:
    """Return the hours of the training; None if its epochs are not known."""
    if question.epochs is None or question.samples_per_epoch is None:
        return None
    return question.epochs * question.samples_per_epoch / step.samples_per_s / 3600


def _memory(known: Known, hardware: Hardware, gpus: int) -> tuple[bool | None, int | None]:
    """Return whether a dry run's memory fits a GPU, and the fewest equal stages that do; measured runs have fitted."""
    if known.memory_bytes is None:
        return True, None
    if hardware.memory_gb is None:
        return None, None
    needed_bytes = known.memory_bytes - known.sharded_bytes * (gpus - 1) / gpus
    stages = math.ceil(needed_bytes / (FILLED * hardware.memory_gb * 1e9))
    return stages == 1, stages if 1 < stages <= hardware.gpus_per_host else None
