"""A picture of the sizes: efficiency against GPUs on a logarithmic axis, with its range and the speeds."""

import math
from collections.abc import Sequence
from pathlib import Path

from launch.advice.estimate.inputs import Known
from launch.advice.estimate.sizes import Size
from launch.machine.show.canvas import Box, Polyline, Shape, Text, save

_WIDTH, _HEIGHT, _LEFT, _TOP = 560.0, 300.0, 70.0, 60.0  # of the plot
_SOFT, _BLUE, _GREY = "#5b6b7b", "#3f8fd2", "#c3ced9"


def draw(found: Sequence[Size], known: Known, path: Path) -> None:
    """Write the picture as SVG; LaunchError for another file type."""
    steps = [size.step for size in found]
    least = min(known.measured, key=lambda one: one.gpus)
    per_gpu, unit = least.samples_per_s / least.gpus, known.job.unit
    highest = 1.02 * max(1.0, *(step.high / step.gpus / per_gpu for step in steps))
    lowest = 0.98 * min(step.low / step.gpus / per_gpu for step in steps)
    first, last = math.log2(steps[0].gpus), math.log2(steps[-1].gpus)

    def place(gpus: int, speed: float) -> tuple[float, float]:
        x = (math.log2(gpus) - first) / (last - first) if last > first else 0.5
        return _LEFT + _WIDTH * x, _TOP + _HEIGHT * (highest - speed / gpus / per_gpu) / (highest - lowest)

    curves = (
        (_GREY, 2.0, [(step.gpus, step.gpus * per_gpu) for step in steps]),
        (_BLUE, 1.0, [(step.gpus, step.low) for step in steps]),
        (_BLUE, 1.0, [(step.gpus, step.high) for step in steps]),
        (_BLUE, 3.0, [(step.gpus, step.samples_per_s) for step in steps]),
    )
    title = f"{known.job.model}: efficiency, its range, and {unit}/s"
    shapes: list[Shape] = [
        Text(x=_LEFT, y=28, text=title, size=16, bold=True, left=True),
        Box(x=_LEFT, y=_TOP, width=_WIDTH, height=_HEIGHT, fill="#ffffff", stroke=_GREY, radius=0),
        Text(x=_LEFT + _WIDTH / 2, y=_TOP + _HEIGHT + 56, text=f"GPUs, {unit}/s", size=12, color=_SOFT),
    ]
    for color, width, points in curves:
        shapes.append(Polyline(points=tuple(place(*point) for point in points), color=color, width=width))
    for step in steps:
        x, bottom = place(step.gpus, step.samples_per_s)[0], _TOP + _HEIGHT
        shapes.append(Text(x=x, y=bottom + 16, text=str(step.gpus), size=12, color=_SOFT))
        shapes.append(Text(x=x, y=bottom + 34, text=f"{step.samples_per_s:,.0f}", size=12, color=_SOFT))
    for share in (lowest, 1.0):
        y = place(1, share * per_gpu)[1]
        shapes.append(Text(x=_LEFT - 32, y=y, text=f"{share:.0%}", size=12, color=_SOFT))
    save(shapes, width=_LEFT + _WIDTH + 40, height=_TOP + _HEIGHT + 76, path=path)
