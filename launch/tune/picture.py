"""A picture of a walk: a bar for each remedy's gain with its interval; credited gains are coloured."""

from collections.abc import Sequence
from pathlib import Path

from launch.machine.show.canvas import Box, Line, Shape, Text, fit, save
from launch.tune.compare import Gain
from launch.tune.walk import Walk

_LEFT, _TOP, _WIDTH, _ROW = 240.0, 60.0, 420.0, 28.0
_SOFT, _BLUE, _ORANGE, _GREY = "#5b6b7b", "#3f8fd2", "#e08a2e", "#c3ced9"


def draw(walk: Walk, path: Path) -> None:
    """Write the picture as SVG; LaunchError if that fails."""
    rows = [
        (trial.remedy.name, trial.gain, (_BLUE if trial.remedy.same_training else _ORANGE) if trial.credited else _GREY)
        for trial in walk.trials
        if trial.gain is not None
    ]
    for name, configuration, color in (("in all", walk.same, _BLUE), ("with another training", walk.best, _ORANGE)):
        total = walk.total(configuration) if configuration else None
        if total is not None and (name == "in all" or walk.best != walk.same):
            rows.append((name, total, color))
    save(_shapes(rows), width=_LEFT + _WIDTH + 90, height=_TOP + _ROW * max(1, len(rows)) + 50, path=path)


def _shapes(rows: Sequence[tuple[str, Gain, str]]) -> list[Shape]:
    most = max([2.0, *(1.1 * gain.times for _, gain, _ in rows)])

    def x(times: float) -> float:
        return _LEFT + _WIDTH * min(max(times, 0.0), most) / most

    bottom = _TOP + _ROW * max(1, len(rows))
    title = "times as fast as before; blue: credited, orange: another training, grey: not credited"
    shapes: list[Shape] = [Text(x=20, y=28, text=title, size=14, bold=True, left=True)]
    for number, (name, gain, color) in enumerate(rows):
        y = _TOP + _ROW * number
        shapes += [
            Text(x=20, y=y + _ROW / 2, text=fit(name, _LEFT - 30, 12), size=12, left=True),
            Box(x=_LEFT, y=y + 5, width=x(gain.times) - _LEFT, height=_ROW - 10, fill=color, stroke=color, radius=2),
            Line(points=((x(gain.low), y + _ROW / 2), (x(gain.high), y + _ROW / 2)), color=_SOFT, width=1.5),
            Text(x=_LEFT + _WIDTH + 40, y=y + _ROW / 2, text=f"{gain.times:.2f}", size=12, color=_SOFT),
        ]
    shapes.append(Line(points=((x(1), _TOP), (x(1), bottom)), color="#1f2933", width=1.0))
    for times in (0, 1, most):
        shapes.append(Text(x=x(times), y=bottom + 18, text=f"{times:.3g}", size=12, color=_SOFT))
    return shapes
