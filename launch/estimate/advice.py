"""Advice on the size, in sentences: exposed communication, the critical batch, deadlines."""

import itertools
import math
from collections.abc import Iterator, Sequence

from launch.estimate.hardware import Hardware
from launch.estimate.helps import SHOWS
from launch.estimate.inputs import Known
from launch.estimate.sizes import Question, Size, hours
from launch.estimate.step import LARGEST_POINT, Step, predict


def advice(found: Sequence[Size], known: Known, hardware: Hardware, question: Question) -> tuple[str, ...]:
    """Return a sentence for each conclusion from the sizes."""
    lines = [_communication(found)] if any(size.step for size in found) else []
    if question.critical is not None:
        most = _most_gpus(known, question)
        stop = f"stop at {most} GPUs" if any(size.gpus > most for size in found) else f"that is {most} GPUs"
        lines.append(
            f"Above a global batch of {question.critical.samples:g} {known.job.unit} ({question.critical.source}) more "
            f"GPUs save no steps: {stop}, with {known.job.batch_per_gpu} {known.job.unit} each."
        )
    if question.deadline_h is not None:
        lines.append(_deadline(known, hardware, question, question.deadline_h))
    usable = [size for size in found if size.hours is not None and not size.past_critical]
    if len(usable) > 1:
        cheapest = min(usable, key=lambda size: size.gpu_hours or math.inf)
        fastest = min(usable, key=lambda size: size.hours or math.inf)
        lines.append(f"Cheapest: {_describe(cheapest)}. Fastest: {_describe(fastest)}.")
        lines += _enough(usable)
    return tuple(lines)


def _communication(found: Sequence[Size]) -> str:
    for size in found:
        if size.step is not None and (share := size.step.exposed_s / size.step.step_s) >= SHOWS:
            return f"Communication shows from {size.gpus} GPUs on: {share:.0%} of a step waits for gradients."
    return f"Communication stays below {SHOWS:.0%} of a step at all sizes."


def _most_gpus(known: Known, question: Question) -> int:
    """Return the number of GPUs at which the batch reaches the critical size."""
    if question.critical is None:
        return LARGEST_POINT
    return max(int(question.critical.samples // known.job.batch_per_gpu), 1)


def _deadline(known: Known, hardware: Hardware, question: Question, deadline_h: float) -> str:
    """Describe the fewest GPUs, in full hosts, that meet the deadline, among all predictable sizes."""
    for step in _steps(known, hardware, question):
        if (needed_h := hours(step, question)) is not None and needed_h <= deadline_h:
            latest_h = needed_h * step.samples_per_s / step.low
            risk = f"; {latest_h:.3g} h at the low end of the band" if latest_h > deadline_h else ""
            return f"Deadline {deadline_h:g} h: {step.gpus} GPUs are the fewest that meet it ({needed_h:.3g} h{risk})."
    return f"Deadline {deadline_h:g} h: no size that can be predicted meets it."


def _steps(known: Known, hardware: Hardware, question: Question) -> Iterator[Step]:
    local, least = hardware.gpus_per_host, max(one.gpus for one in known.measured)
    most = min(LARGEST_POINT, _most_gpus(known, question))
    one_rank = least == 1 and not known.measured[0].is_dry_run
    if hardware.link_gb_per_s is None or one_rank:
        most = min(most, local)
    for gpus in itertools.chain(range(least, local), range(math.ceil(least / local) * local, most + 1, local)):
        if gpus <= most:
            yield predict(known.job, hardware, known.measured, gpus)


def _enough(usable: Sequence[Size]) -> list[str]:
    """Describe the size above which added GPUs gain less than half of their share."""
    for less, more in itertools.pairwise(usable):
        gained = (less.hours or 0.0) / (more.hours or math.inf)
        if gained - 1 < (more.gpus / less.gpus - 1) / 2:
            return [f"{less.gpus} GPUs are enough: {more.gpus} are only {gained:.2f} times as fast."]
    return []


def _describe(size: Size) -> str:
    cost = "" if size.cost is None else f", cost {size.cost:.3g}"
    return f"{size.gpus} GPUs ({size.hours:.3g} h, {size.gpu_hours:.3g} GPU-hours{cost})"
