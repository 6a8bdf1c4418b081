"""Pictures of learning curves, and of the results of a scaling study."""

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import patheffects
from matplotlib.figure import Figure

from hvdtrain.compare.groups import Group, labels
from hvdtrain.compare.metrics import ACCURACY, best_metric
from hvdtrain.compare.runs import Point, Run
from hvdtrain.compare.study import Study, advised_size

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

COLOURS = ("#2563a8", "#d1495b", "#2e8b57", "#e0922f", "#7a5195", "#0f8b8d", "#8d6e63", "#5c6670")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
INK, FAINT = "#24292f", "#8b949e"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e8eb",
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "hvdtrain",
    "text.parse_math": False,  # names of runs may contain dollar signs
}

LEGEND_LETTERS = 150  # in a line below the learning curves
LEGEND_INCHES = 0.2  # the height of such a line
DASHED = (0, (4, 3))
Position = Callable[[Point], float | None]  # position of a point on the x axis


def to_png(figure: Figure) -> bytes:
    """The figure as PNG, for files and TensorBoard."""
    with mpl.rc_context(STYLE):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        return buffer.getvalue()


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG, for pages: sharp at any size."""
    with mpl.rc_context(STYLE):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def group_colour(index: int) -> str:
    """The colour of the group in this row of the table."""
    return COLOURS[index % len(COLOURS)]


def draw_curves(groups: Sequence[Group]) -> Figure:
    """Train loss and the test's best metric over steps, epochs and seconds: each run thin, a group's mean thick."""
    units: tuple[tuple[str, Position], ...] = (
        ("steps", lambda point: point.step),
        ("epochs", lambda point: point.epoch),
        ("seconds", lambda point: point.seconds),
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        axes = figure.subplots(2, 3, sharey="row", sharex="col")
        handles: dict[str, Artist] = {}  # by label: matplotlib's own list leaves out names that begin with _
        best = best_metric([run for group in groups for run in group.runs])
        shown = (("train/loss", "train loss", 1.0), (f"eval/{best.name}", best.axis, best.scale))
        for row, (metric, title, scale) in enumerate(shown):
            axes[row][0].set_ylabel(title)
            for column, (unit, position) in enumerate(units):
                for index, (group, label) in enumerate(zip(groups, labels(groups), strict=True)):
                    lines = [_line(run, metric, position, scale) for run in group.runs]
                    handles |= _draw_group(axes[row][column], [line for line in lines if line], label, index)
                if row == 0:
                    axes[row][column].set_title(f"over {unit}")
                axes[1][column].set_xlabel(unit)
        if handles:
            ncols = max(1, min(4, len(handles), LEGEND_LETTERS // max(map(len, handles))))
            figure.set_figheight(6.4 + LEGEND_INCHES * max(0, math.ceil(len(handles) / ncols) - 2))
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=ncols, frameon=False)
        else:
            figure.text(0.5, 0.5, "no learning curves: no metrics.jsonl with metrics", ha="center", color=FAINT)
    return figure


def _draw_group(
    axes: "Axes", lines: Sequence[Sequence[tuple[float, float]]], label: str, index: int
) -> "dict[str, Artist]":
    """Draw a group's lines; return its legend entry, or None without lines."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    mean = _mean(lines)
    is_single = len(lines) == 1
    artists: list[Artist] = []
    for line in lines:
        artists += axes.plot(
            *zip(*line, strict=True),
            color=group_colour(index),
            linestyle=dash,
            linewidth=1.8 if is_single else 0.9,
            alpha=1.0 if is_single else 0.45,
            marker="o" if len(line) == 1 else None,
        )
    if mean:
        [mean_line] = axes.plot(*zip(*mean, strict=True), color=group_colour(index), linestyle=dash, linewidth=2.2)
        return {f"{label}; mean of {len(lines)}": mean_line}
    return {label: artists[0]} if artists else {}


def _line(run: Run, metric: str, position: Position, scale: float) -> list[tuple[float, float]]:
    points = [(position(point), scale * point.value) for point in run.curve(metric)]
    return [(x, y) for x, y in points if x is not None]


def _mean(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of the lines point by point; empty for a single line, or if their numbers of points differ."""
    if len(lines) < 2 or len({len(line) for line in lines}) > 1:
        return []
    count = len(lines)
    return [
        (math.fsum(x for x, _ in points) / count, math.fsum(y for _, y in points) / count)
        for points in zip(*lines, strict=True)
    ]


def draw_scaling(study: Study) -> Figure:
    """Speed-up against the ideal, efficiency and best metric over ranks; bars are standard deviations over seeds."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.3), layout="constrained")
        pictures = figure.subplots(1, 3)
        if not study.measured_sizes:
            figure.text(0.5, 0.5, "no size has a result yet", ha="center", color=FAINT)
            return figure
        _draw_speed_up(pictures[0], study)
        _draw_efficiency(pictures[1], study)
        _draw_best(pictures[2], study)
        for axes in pictures:
            _draw_ranks_axis(axes, study)
        counts = sorted({len(size.runs) for size in study.measured_sizes})
        runs = "1 run" if counts == [1] else f"{'-'.join(map(str, counts))} runs"
        title = f"{study.name}: {study.mode} scaling, {runs} of each size; bars are standard deviations"
        figure.set_layout_engine("constrained", h_pad=0.08)
        figure.suptitle(title, x=0.006, ha="left", color=INK, fontsize=11)
    return figure


def _draw_speed_up(axes: "Axes", study: Study) -> None:
    axes.set_title("speed-up")
    sizes = [size.np for size in study.measured_sizes]
    values = [value for size in study.measured_sizes if (value := study.speed_up(size)) is not None]
    ideal = [size.np for size in study.sizes]
    axes.plot(ideal, ideal, color=FAINT, linestyle=DASHED, linewidth=1.4, zorder=1)
    axes.annotate("ideal", (ideal[-1], ideal[-1]), (-8, 0), textcoords="offset points", ha="right", color=FAINT)
    deviations = _relative_deviations(study, values)
    _draw_bars(axes, sizes, values, deviations, COLOURS[0])
    axes.set_yscale("log", base=2)
    low = min(value - (deviation or 0) for value, deviation in zip(values, deviations, strict=True))
    axes.set_ylim(0.75 * max(low, min(values) / 2), 1.3 * max(*values, ideal[-1]))
    axes.set_yticks(ideal, [f"{tick:g}" for tick in ideal])
    axes.minorticks_off()
    for size, value in zip(sizes, values, strict=True):
        _annotate(axes, f"{value:.2f}", size, value, below=True)


def _draw_efficiency(axes: "Axes", study: Study) -> None:
    axes.set_title("efficiency, %")
    sizes = [size.np for size in study.measured_sizes]
    values = [value for size in study.measured_sizes if (value := study.efficiency(size)) is not None]
    axes.axhline(100, color=FAINT, linestyle=DASHED, linewidth=1.4, zorder=1)
    _draw_limit(axes, study.min_efficiency)
    deviations = _relative_deviations(study, values)
    _draw_bars(axes, sizes, values, deviations, COLOURS[2])
    high = max(value + (deviation or 0) for value, deviation in zip(values, deviations, strict=True))
    axes.set_ylim(0, max(115.0, 1.08 * high))
    for size, value in zip(sizes, values, strict=True):
        _annotate(axes, f"{value:.0f}", size, value)


def _draw_best(axes: "Axes", study: Study) -> None:
    """The metric by which the task selects its best weights."""
    metric = study.best
    axes.set_title(metric.axis)
    found = [(size.np, size.metric(metric)) for size in study.measured_sizes]
    points = [(np, mean) for np, mean in found if mean is not None]
    if not points:
        return
    sizes, means = [np for np, _ in points], [mean.mean for _, mean in points]
    has_limit = metric is ACCURACY and study.max_loss is not None and sizes[0] == study.measured_sizes[0].np
    _draw_limit(axes, means[0] - (study.max_loss or 0.0) if has_limit else None)
    _draw_bars(axes, sizes, means, [mean.deviation for _, mean in points], COLOURS[1])
    low, high = axes.get_ylim()
    least = 2.0 if metric is ACCURACY else 0.02 * max(map(abs, means))  # so that small differences look small
    padding = max(0.0, least - (high - low)) / 2
    axes.set_ylim(low - padding - 0.08 * (high - low), high + padding)
    for size, value in zip(sizes, means, strict=True):
        _annotate(axes, f"{value:.1f}" if metric is ACCURACY else metric.number_format(value), size, value)


def _draw_bars(
    axes: "Axes", x: Sequence[float], y: Sequence[float], deviations: Sequence[float | None], bar_colour: str
) -> None:
    axes.errorbar(
        x,
        y,
        yerr=[deviation or 0.0 for deviation in deviations],
        color=bar_colour,
        marker="o",
        markersize=7,
        markeredgecolor="white",
        linewidth=2,
        capsize=4,
        elinewidth=1.4,
    )


def _relative_deviations(study: Study, values: Sequence[float]) -> list[float | None]:
    """The standard deviations of images/s, in the unit of the values."""
    speeds = [size.speed for size in study.measured_sizes if size.speed is not None]
    return [
        None if speed.deviation is None else value * speed.deviation / speed.mean
        for speed, value in zip(speeds, values, strict=True)
    ]


def _annotate(axes: "Axes", text: str, x: float, y: float, *, below: bool = False) -> None:
    """Write the text next to its point, with an outline that keeps it readable over lines."""
    rim = [patheffects.withStroke(linewidth=3, foreground="white")]
    axes.annotate(
        text, (x, y), (8, -13 if below else 5), textcoords="offset points", fontsize=9, color=INK, path_effects=rim
    )


def _draw_limit(axes: "Axes", value: float | None) -> None:
    if value is not None:
        axes.axhline(value, color=COLOURS[3], linewidth=1.4, zorder=1)
        transform = axes.get_yaxis_transform()  # x from 0 at the left end to 1 at the right end
        axes.text(0.99, value, "limit", color=COLOURS[3], fontsize=9, ha="right", va="bottom", transform=transform)


def _draw_ranks_axis(axes: "Axes", study: Study) -> None:
    """A tick for every size, marked if it is advised or has no result."""
    sizes = [size.np for size in study.sizes]
    best = advised_size(study)
    axes.set_xscale("log", base=2)
    marks = ["no result" if size.speed is None else "advised" * (size is best) for size in study.sizes]
    axes.set_xticks(sizes, [f"{np}\n{mark}" for np, mark in zip(sizes, marks, strict=True)])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.35)
    axes.set_xlabel("ranks")
