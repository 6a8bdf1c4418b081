"""Predicts the step of N GPUs from the step of fewer: compute, exposed sums, negotiation and stragglers.

The model is T(N) = (T(M) - c(M)) (1 + s (m(N) - m(M))) + c(N). Time other than communication is that of the M measured
GPUs, except for the slowest of N ranks, which is later the more ranks there are: m is the expected maximum of N normal
deviations, about sqrt(2 ln N). c is the part of the sums that backward does not hide, computed bucket by bucket, plus
negotiation.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from launch.advice.estimate.allreduce import Algorithm, AllreduceTime, cheapest, costs
from launch.advice.estimate.hardware import Hardware

STRAGGLERS = 0.07  # deviation of a rank's step, as a share of it; five public tables fit alike with 0.05 to 0.1
BACKWARD = 2 / 3  # of a step's computation: backward does twice the work of forward (Epoch AI 2022)
OVERLAP = 0.75  # of backward, while which sums travel: an assumption; with BACKWARD half of the step hides them
DDP_BUCKET_BYTES = 25 * 2**20  # torch's DistributedDataParallel (reducer.hpp), of which published tables are
BUCKET_BYTES, FIRST_BUCKET_BYTES = 8 * 2**20, 2**20  # hvdtrain's, of gradients in fp32
CYCLE_S = 0.5e-3  # half of Horovod's cycle of 1 ms (its release notes, 0.21.0): how long gradients wait on average
NEGOTIATION_HOP_S = 15e-6  # a message of Horovod's coordinator, of which there are 2 log2(hosts): an assumption
# Of the speed, on each side of the prediction. All published rows of bench/cases/published.py are inside the first; the
# second is an assumption for what no table checks: dry runs, one GPU, machines without a table over several hosts.
RANGE, UNCHECKED_RANGE = 0.15, 0.3
CHECKED = ("dgx-a100",)  # machines with a public table over several hosts
CHECKED_GPUS = 64  # the largest size of these tables


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The properties of a training that determine how its step scales."""

    model: str
    unit: str  # for example images
    precision: str
    batch_per_gpu: int
    gradient_bytes: int  # of all gradients, as they travel
    bucket_bytes: int = DDP_BUCKET_BYTES
    first_bucket_bytes: int = 0  # of one that is sent before those of bucket_bytes; 0 for none
    micro_batches: int = 1
    overlap: float = OVERLAP


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """A size with known speed."""

    gpus: int
    per_host: int
    samples_per_s: float  # of the whole job
    source: str
    is_dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientAllreduce:
    """The all-reduce of a step's gradients."""

    cost: AllreduceTime
    total_s: float
    exposed_s: float  # not hidden by backward


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The predicted step of one size."""

    gpus: int
    step_s: float
    compute_s: float
    exposed_s: float
    negotiation_s: float
    stragglers_s: float
    sums_s: float  # all sums, hidden or exposed
    algorithm: Algorithm
    samples_per_step: int
    extrapolated: bool  # no published table shows the accuracy of such a prediction

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step / self.step_s

    @property
    def low(self) -> float:
        """The lower end of the range, samples/s."""
        return self.samples_per_s / (1 + self._range)

    @property
    def high(self) -> float:
        """The upper end of the range, samples/s."""
        return self.samples_per_s * (1 + self._range)

    @property
    def _range(self) -> float:
        return UNCHECKED_RANGE if self.extrapolated else RANGE


def buckets(job: Workload) -> tuple[float, int, float]:
    """Bytes of the first bucket, 0 if it is like the others; how many others there are, and the bytes of each."""
    first = job.first_bucket_bytes if job.first_bucket_bytes < job.gradient_bytes else 0
    count = max(math.ceil((job.gradient_bytes - first) / job.bucket_bytes), 1)
    return first, count, (job.gradient_bytes - first) / count


def sums(job: Workload, options: tuple[AllreduceTime, ...], compute_s: float) -> GradientAllreduce:
    """The sums of a step, bucket by bucket: the last one travels after backward, the others during it."""
    first, count, size = buckets(job)
    cost = cheapest(options, size)
    last_s = cost.seconds(size)
    before_s = (count - 1) * last_s + (cheapest(options, first).seconds(first) if first else 0.0)
    work_s = (job.gradient_bytes - size) * cost.work_s_per_byte  # of the CPU, during which backward stands still
    hidden_s = job.overlap * BACKWARD * compute_s / job.micro_batches
    exposed_s = last_s + work_s + max(0.0, before_s - work_s - hidden_s)
    return GradientAllreduce(cost=cost, total_s=before_s + last_s, exposed_s=exposed_s)


def negotiation_s(hardware: Hardware, gpus: int) -> float:
    """Return the time of Horovod's negotiation of the last bucket: half a cycle, and messages in a tree of hosts."""
    hosts = math.ceil(gpus / hardware.gpus_per_host)
    return 0.0 if gpus == 1 else CYCLE_S + 2 * math.log2(hosts) * NEGOTIATION_HOP_S


def late(gpus: int) -> float:
    """Return the delay of the slowest of these ranks, in deviations: the expected maximum (Blom 1958)."""
    return NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


def base(measured: tuple[MeasuredSize, ...], hardware: Hardware, gpus: int) -> MeasuredSize:
    """Return the size to predict from: the largest with equally many GPUs per host as `gpus`, else the largest."""
    per_host = min(gpus, hardware.gpus_per_host)
    alike = [one for one in measured if one.per_host == per_host and one.gpus <= gpus]
    return max(alike or measured, key=lambda one: one.gpus)


def alone_s(job: Workload, hardware: Hardware, known: MeasuredSize) -> float:
    """Return the measured step without exposed sums; these depend on the result, so it is found by iteration."""
    step_s = known.gpus * job.batch_per_gpu / known.samples_per_s
    options = costs(replace(hardware, gpus_per_host=known.per_host), known.gpus)
    rest_s = step_s - (0.0 if known.is_dry_run else negotiation_s(hardware, known.gpus))
    compute_s = rest_s
    for _ in range(20):
        compute_s = max(rest_s - sums(job, options, compute_s).exposed_s, 0.05 * step_s)
    return compute_s


def predict(
    job: Workload, hardware: Hardware, measured: tuple[MeasuredSize, ...], gpus: int, *, stragglers: float = STRAGGLERS
) -> PredictedStep:
    """Predict the step of `gpus` GPUs on full hosts; `stragglers` is the deviation of ranks as a share of a step."""
    known = base(measured, hardware, gpus)
    compute_s = alone_s(job, hardware, known)
    travel = sums(job, costs(hardware, gpus), compute_s)
    stragglers_s = compute_s * stragglers * (late(gpus) - late(known.gpus))
    agreed_s = negotiation_s(hardware, gpus)
    step_s = compute_s + stragglers_s + travel.exposed_s + agreed_s
    return PredictedStep(
        gpus=gpus,
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=travel.exposed_s,
        negotiation_s=agreed_s,
        stragglers_s=stragglers_s,
        sums_s=travel.total_s,
        algorithm=travel.cost.algorithm,
        samples_per_step=gpus * job.batch_per_gpu,
        extrapolated=_is_extrapolated(hardware, known, gpus),
    )


def _is_extrapolated(hardware: Hardware, known: MeasuredSize, gpus: int) -> bool:
    if gpus == known.gpus and not known.is_dry_run:
        return False
    is_checked = hardware.name in CHECKED and gpus <= CHECKED_GPUS and known.gpus >= hardware.gpus_per_host
    return known.is_dry_run or not is_checked
