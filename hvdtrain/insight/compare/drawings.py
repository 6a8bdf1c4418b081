"""The picture of the results of a scaling study."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from hvdtrain.insight.compare.metrics import ACCURACY
from hvdtrain.insight.compare.spread import Mean
from hvdtrain.insight.compare.study import RecordedStudy, advised_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: Any = {
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e8eb",
    "text.parse_math": False,  # names of runs may contain dollar signs
}


def to_png(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def draw_scaling(study: RecordedStudy) -> Figure:
    """Speed-up against the ideal, efficiency and best metric over ranks; bars are standard deviations over seeds."""
    sizes, metric, ranks = study.sizes, study.best, [size.np for size in study.sizes]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.3), layout="constrained")
        if not study.measured_sizes:
            figure.text(0.5, 0.5, "no size has a result yet", ha="center")
            return figure
        speed_up, efficiency, best = figure.subplots(1, 3)
        speed_up.plot(ranks, ranks, color="grey", linestyle="--")
        speed_up.annotate("ideal", (ranks[-1], ranks[-1]), (-8, 0), textcoords="offset points", ha="right")
        means = [study.speed_up(size) for size in sizes]
        _draw_means(speed_up, study, "speed-up", means, "{:.2f}".format, raised=-13)
        speed_up.set_yscale("log", base=2)
        speed_up.set_yticks(ranks, map(str, ranks))
        speed_up.minorticks_off()
        efficiency.axhline(100, color="grey", linestyle="--")
        _draw_means(efficiency, study, "efficiency, %", [study.efficiency(size) for size in sizes], "{:.0f}".format)
        _draw_limit(efficiency, study.min_efficiency)
        efficiency.set_ylim(bottom=0)
        means = [size.metric(metric) for size in sizes]
        _draw_means(best, study, metric.axis, means, metric.number_format)
        if metric is ACCURACY and study.max_loss is not None and (first := study.measured_sizes[0].metric(metric)):
            _draw_limit(best, first.mean - study.max_loss)
        title = f"{study.name}: {study.mode} scaling; bars are standard deviations over seeds"
        figure.suptitle(title, x=0.006, ha="left", fontsize=11)
    return figure


def _draw_means(
    axes: "Axes",
    study: RecordedStudy,
    title: str,
    means: Sequence[Mean | None],
    number_format: Callable[[float], str],
    *,
    raised: int = 5,
) -> None:
    """Draw the mean of each size, written next to its point and `raised` a little; ticks mark the advised size."""
    axes.set_title(title)
    points = [(size.np, mean) for size, mean in zip(study.sizes, means, strict=True) if mean is not None]
    values = [mean.mean for _, mean in points]
    bars = [mean.deviation or 0.0 for _, mean in points]
    axes.errorbar([np for np, _ in points], values, yerr=bars, marker="o", linewidth=2, capsize=4)
    for np, mean in points:
        axes.annotate(number_format(mean.mean), (np, mean.mean), (8, raised), textcoords="offset points", fontsize=9)
    advised = advised_size(study)
    marks = ["no result" if size.speed is None else "advised" * (size is advised) for size in study.sizes]
    axes.margins(x=0.15, y=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [size.np for size in study.sizes], [f"{size.np}\n{mark}" for size, mark in zip(study.sizes, marks, strict=True)]
    )
    axes.minorticks_off()
    axes.set_xlabel("ranks")


def _draw_limit(axes: "Axes", value: float | None) -> None:
    if value is not None:
        axes.axhline(value, color="C1")
        transform = axes.get_yaxis_transform()  # x from 0 at the left end to 1 at the right end
        axes.text(0.99, value, "limit", color="C1", fontsize=9, ha="right", va="bottom", transform=transform)
