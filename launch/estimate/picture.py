"""A picture of the sizes: samples/s against GPUs, both doubling, with the band and what linear scaling would give."""

import math
from collections.abc import Sequence
from pathlib import Path

from launch.errors import CommandError
from launch.estimate.inputs import Known
from launch.estimate.sizes import Size
from launch.machine.show.canvas import Box, Line, Shape, Text, save

_WIDTH, _HEIGHT, _LEFT, _TOP = 560.0, 340.0, 90.0, 60.0  # of the plot
_INK, _SOFT, _BAND, _LINEAR = "#1f2933", "#5b6b7b", "#3f8fd2", "#c3ced9"


def draw(found: Sequence[Size], known: Known, path: Path) -> None:
    """Write the picture as SVG; LaunchError for another ending, or without a size that is predicted."""
    steps = [(size.gpus, size.step) for size in found if size.step is not None]
    if not steps:
        raise CommandError("--picture: no size is predicted, so there is nothing to draw")
    told = max(known.measured, key=lambda one: one.gpus)
    per_gpu = told.samples_per_s / told.gpus
    first, last = math.log2(steps[0][0]), math.log2(steps[-1][0])
    lowest = math.log2(min(steps[0][0] * per_gpu, steps[0][1].low))
    highest = math.log2(max(steps[-1][0] * per_gpu, steps[-1][1].high))

    def place(gpus: float, speed: float) -> tuple[float, float]:
        x = _LEFT + _WIDTH * ((math.log2(gpus) - first) / (last - first) if last > first else 0.5)
        return x, _TOP + _HEIGHT * (1 - (math.log2(speed) - lowest) / max(highest - lowest, 1e-9))

    shapes: list[Shape] = [
        Text(
            x=_LEFT,
            y=28,
            text=f"{known.job.model}: {known.job.unit}/s, band of 90 %",
            size=16,
            bold=True,
            left=True,
            color=_INK,
        ),
        Box(x=_LEFT, y=_TOP, width=_WIDTH, height=_HEIGHT, fill="#ffffff", stroke=_LINEAR, radius=0),
    ]
    curves = (
        (_LINEAR, 2.0, [(gpus, gpus * per_gpu) for gpus, _ in steps]),
        (_BAND, 1.0, [(gpus, step.low) for gpus, step in steps]),
        (_BAND, 1.0, [(gpus, step.high) for gpus, step in steps]),
        (_BAND, 3.0, [(size.gpus, size.step.samples_per_s) for size in found if size.step and not size.is_band]),
    )
    shapes += [
        Line(points=tuple(place(*point) for point in points), color=color, width=width)
        for color, width, points in curves
        if points
    ]
    for gpus, step in steps:
        x, y = place(gpus, step.samples_per_s)
        shapes.append(Text(x=x, y=_TOP + _HEIGHT + 16, text=str(gpus), size=12, color=_SOFT))
        shapes.append(Text(x=_LEFT - 40, y=y, text=f"{step.samples_per_s:.3g}", size=12, color=_SOFT))
    shapes.append(Text(x=_LEFT + _WIDTH / 2, y=_TOP + _HEIGHT + 38, text="GPUs; grey: linear", size=12, color=_SOFT))
    save(shapes, width=_LEFT + _WIDTH + 40, height=_TOP + _HEIGHT + 60, path=path)
