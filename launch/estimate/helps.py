"""What would bring efficiency back where ranks wait for gradients, by the same model."""

from dataclasses import dataclass, replace

from launch.estimate.allreduce import Cost, cheapest, costs
from launch.estimate.hardware import Hardware
from launch.estimate.step import Job, Step, sums

SHOWS = 0.05  # communication shows from this share of a step
LEAST_GAIN = 0.01  # for which a way is named
MICRO_BATCHES = 4
ROUND_STEPS = 16  # of --sync local
ROUND_SENDS = 2  # parameters, and at least one thing that the optimizer remembers of each
POWERSGD_SHARE = 1 / 25  # of the gradients of efficientnet_b0 that --compression powersgd:2 sends (docs/slow-links.md)


@dataclass(frozen=True, kw_only=True)
class Help:
    """A way to wait less for gradients."""

    option: str
    times_as_fast: float  # samples/s, at most


def helps(job: Job, hardware: Hardware, step: Step) -> tuple[Help, ...]:
    """The ways that make a size faster where communication shows, the best first."""
    if step.exposed_s < SHOWS * step.step_s:
        return ()
    options = costs(hardware, step.gpus)
    two_level = tuple(cost for cost in options if cost.algorithm == "two-level")
    whole_s = cheapest(options, job.gradient_bytes).seconds(ROUND_SENDS * job.gradient_bytes)
    exposed_s = {
        f"--accumulate-steps {MICRO_BATCHES}": step.exposed_s / MICRO_BATCHES,  # of each micro-batch
        f"--sync local --sync-every {ROUND_STEPS}": whole_s / ROUND_STEPS,
        "--compression fp16": _exposed_s(job, options, step, 0.5),
        "--compression powersgd:2": _exposed_s(job, options, step, POWERSGD_SHARE),
        **({"--sync two-level": _exposed_s(job, two_level, step, 1.0)} if two_level else {}),
    }
    faster = {option: step.step_s / (step.step_s - step.exposed_s + seconds) for option, seconds in exposed_s.items()}
    ways = (Help(option=option, times_as_fast=times) for option, times in faster.items() if times > 1 + LEAST_GAIN)
    return tuple(sorted(ways, key=lambda way: -way.times_as_fast))


def _exposed_s(job: Job, options: tuple[Cost, ...], step: Step, share: float) -> float:
    """What nothing hides if only a share of the gradients travels, in as many buckets."""
    bucket_bytes = max(round(job.bucket_bytes * share), 1)
    sent = replace(job, gradient_bytes=round(job.gradient_bytes * share), bucket_bytes=bucket_bytes)
    return sums(sent, options, step.compute_s).exposed_s
