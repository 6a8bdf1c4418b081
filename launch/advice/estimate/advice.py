"""Advice on the size, in sentences: exposed communication, the critical batch, deadlines."""

import math
from collections.abc import Sequence

from launch.advice.estimate.hardware import Hardware
from launch.advice.estimate.helps import SHOWS
from launch.advice.estimate.inputs import Known
from launch.advice.estimate.sizes import Question, Size, hours
from launch.advice.estimate.step import predict

MOST_GPUS = 1024  # among which the fewest for a deadline are sought


def advice(found: Sequence[Size], known: Known, hardware: Hardware, question: Question) -> tuple[str, ...]:
    """Return a sentence for each conclusion from the sizes."""
    lines = [_communication(found)]
    most = MOST_GPUS
    if question.critical is not None:
        most = max(int(question.critical.samples // known.job.batch_per_gpu), 1)
        stop = f"stop at {most} GPUs" if any(size.gpus > most for size in found) else f"that is {most} GPUs"
        lines.append(
            f"Above a global batch of {question.critical.samples:g} {known.job.unit} ({question.critical.source}) more "
            f"GPUs save no steps: {stop}, with {known.job.batch_per_gpu} {known.job.unit} each."
        )
    if question.deadline_h is not None:
        lines.append(_deadline(known, hardware, question, most))
    usable = [size for size in found if size.hours is not None and not size.past_critical_batch]
    if len(usable) > 1:
        cheapest = min(usable, key=lambda size: size.gpu_hours or math.inf)
        fastest = min(usable, key=lambda size: size.hours or math.inf)
        lines.append(f"Cheapest: {_describe(cheapest)}. Fastest: {_describe(fastest)}.")
    return tuple(lines)


def _communication(found: Sequence[Size]) -> str:
    for size in found:
        if (share := size.step.exposed_s / size.step.step_s) >= SHOWS:
            return f"Communication shows from {size.gpus} GPUs on: {share:.0%} of a step waits for gradients."
    return f"Communication stays below {SHOWS:.0%} of a step at all sizes."


def _deadline(known: Known, hardware: Hardware, question: Question, most: int) -> str:
    """Describe the fewest GPUs, in full hosts, that meet the deadline, among sizes up to `most`."""
    deadline_h, local = question.deadline_h or 0.0, hardware.gpus_per_host
    least, most = max(one.gpus for one in known.measured), min(MOST_GPUS, most)
    if hardware.link_gb_per_s is None:
        most = min(most, local)
    for gpus in (*range(least, min(local, most + 1)), *range(math.ceil(least / local) * local, most + 1, local)):
        step = predict(known.job, hardware, known.measured, gpus)
        if (needed_h := hours(step, question)) is not None and needed_h <= deadline_h:
            latest_h = needed_h * step.samples_per_s / step.low
            risk = f"; {latest_h:.3g} h at the low end of the range" if latest_h > deadline_h else ""
            return f"Deadline {deadline_h:g} h: {gpus} GPUs are the fewest that meet it ({needed_h:.3g} h{risk})."
    return f"Deadline {deadline_h:g} h: no size that can be predicted meets it."


def _describe(size: Size) -> str:
    cost = "" if size.cost is None else f", cost {size.cost:.3g}"
    return f"{size.gpus} GPUs ({size.hours:.3g} h, {size.gpu_hours:.3g} GPU-hours{cost})"
