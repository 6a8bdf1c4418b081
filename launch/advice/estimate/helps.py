"""Options that would improve efficiency if ranks wait for gradients, predicted by the same model."""

from dataclasses import replace

from launch.advice.estimate.allreduce import cheapest, costs
from launch.advice.estimate.hardware import Hardware
from launch.advice.estimate.step import PredictedStep, Workload, sums

SHOWS = 0.05  # share of a step from which exposed communication matters
LEAST = 1.01  # times as fast, of a proposal
MICRO_BATCHES = 4
ROUND_STEPS = 16  # of --sync local
ROUND_SENDS = 2  # parameters, and at least one thing that the optimizer remembers of each
POWERSGD_SHARE = 1 / 25  # of the gradients of efficientnet_b0 that --compression powersgd:2 sends (docs: benchmarks)
# Seconds that a core takes to make and undo the matrices, for a byte of gradients: 16 MB of efficientnet_b0 in 55 ms
# (docs: benchmarks). The time of a GPU was not measured and is not counted.
POWERSGD_CORE_S = 3.4e-9
POWERSGD_SUMS = 3  # one after the other: the left matrices, the right ones, and what stays as it is


def helps(job: Workload, hardware: Hardware, step: PredictedStep) -> dict[str, float]:
    """Return how many times as fast each option makes a size at most, best first; empty if communication is hidden."""
    if step.exposed_s < SHOWS * step.step_s:
        return {}
    faster = {option: step.step_s / seconds for option, seconds in ways_s(job, hardware, step).items()}
    return {option: faster[option] for option in sorted(faster, key=lambda it: -faster[it]) if faster[option] > LEAST}


def ways_s(job: Workload, hardware: Hardware, step: PredictedStep) -> dict[str, float]:
    """Return the step time with each option, for the same number of samples.

    Two-level sums, local rounds and PowerSGD of hvdtrain begin after backward, so they are fully exposed.
    """
    options, size = costs(hardware, step.gpus), job.gradient_bytes
    two_level = next((cost for cost in options if cost.algorithm == "two-level"), options[0])
    half = replace(
        job,
        gradient_bytes=size // 2,
        bucket_bytes=max(job.bucket_bytes // 2, 1),
        first_bucket_bytes=job.first_bucket_bytes // 2,
    )
    local = costs(hardware, min(step.gpus, hardware.gpus_per_host))[0]
    core_s = size / hardware.cores_per_rank if hardware.is_cpu else 0.0
    thin = POWERSGD_SHARE * size / POWERSGD_SUMS
    exposed_s = {
        f"--accumulate-steps {MICRO_BATCHES}": step.exposed_s / MICRO_BATCHES,  # of each micro-batch
        f"--sync local:{ROUND_STEPS}": cheapest(options, size).seconds(ROUND_SENDS * size) / ROUND_STEPS
        + local.work_s_per_byte * size,  # of the sums inside a host
        "--compression fp16": sums(half, options, step.compute_s).exposed_s,
        "--compression powersgd:2": POWERSGD_SUMS * cheapest(options, thin).seconds(thin) + POWERSGD_CORE_S * core_s,
        "--sync two-level": two_level.seconds(size),
    }
    return {option: step.step_s - step.exposed_s + seconds for option, seconds in exposed_s.items()}
