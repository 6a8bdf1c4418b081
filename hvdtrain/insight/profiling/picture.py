"""Plots the mean step of every rank as a stacked bar, and the isolated and exposed time of each part."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain.core.phases import PHASES, Phase
from hvdtrain.insight.profiling.parts import PARTS, Parts
from hvdtrain.insight.profiling.profile import Profile
from hvdtrain.insight.profiling.verdict import NAMES, RankMeans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 16

# Input green, compute blue, communication red, the rest grey.
_COLOURS: dict[Phase, str] = {
    "read": "#1b7837",
    "augment": "#5aae61",
    "to_device": "#a6dba0",
    "forward": "#08519c",
    "loss": "#9ecae1",
    "backward": "#3182bd",
    "bubble": "#fddbc7",
    "sync": "#d6604d",
    "optimizer": "#6baed6",
    "record": "#969696",
    "other": "#d9d9d9",
}
_WAITING = "#f4a582"


def draw(profile: Profile) -> "Figure":
    """Draw bars in milliseconds below the verdict; with many ranks only MAX_BARS, from the fastest to the slowest.

    If both passes were measured, the parts of a step are drawn below.
    """
    from matplotlib.figure import Figure

    ranks, parts = _choose_ranks(profile.ranks), profile.parts
    heights = [1.4 + 0.5 * len(ranks), *([4.2] if parts else [])]
    figure = Figure(figsize=(7, 1.5 + sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _draw_ranks(axes[0], ranks)
    axes[0].set_xlabel(f"ms per step, mean of {ranks[0].steps} steps")
    axes[0].set_title(textwrap.fill(profile.verdict.sentence, 72), fontsize=11, loc="left")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10, frameon=False)
    if parts:
        _draw_parts(axes[1], parts)
    return figure


def _draw_ranks(axes: "Axes", ranks: Sequence[RankMeans]) -> None:
    left = [0.0] * len(ranks)
    longest_s = max(means.sum_s for means in ranks)
    labels = [f"rank {means.rank}, {means.host}" for means in ranks]
    for phase in PHASES:
        widths = [1000 * means.phases_s[phase] for means in ranks]
        bars = axes.barh(labels, widths, left=left, color=_COLOURS[phase], label=NAMES[phase], height=0.7)
        texts = [f"{width:.3g}" if width > 60 * longest_s else "" for width in widths]  # 6 % of the widest bar
        dark = phase in ("read", "forward", "backward", "sync")
        axes.bar_label(bars, texts, label_type="center", fontsize=10, color="white" if dark else "black")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.margins(x=0, y=0.02)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_parts(axes: "Axes", parts: Parts) -> None:
    """Draw each part's isolated time in a pale colour, above its exposed time."""
    colours = [*(_COLOURS[phases[0]] for phases in PARTS.values()), _WAITING]
    for shift, alpha, seconds in (
        (-0.2, 0.4, [part.isolated_s for part in parts.parts]),
        (0.2, 1.0, [part.exposed_s for part in parts.parts]),
    ):
        positions = [index + shift for index in range(len(parts.parts))]
        bars = axes.barh(positions, [1000 * value for value in seconds], height=0.38, color=colours, alpha=alpha)
        axes.bar_label(bars, [f"{1000 * value:.3g}" for value in seconds], padding=3, fontsize=9)
    hidden = {part.part: f"\n{part.hidden:.0%} hidden" for part in parts.parts if part.hidden is not None}
    axes.set_yticks(range(len(parts.parts)), [part.part + hidden.get(part.part, "") for part in parts.parts])
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms per step: pale, the part alone; full, what it adds to a step")
    axes.set_title(textwrap.fill(parts.sentence, 72), fontsize=11, loc="left")


def _choose_ranks(ranks: Sequence[RankMeans]) -> list[RankMeans]:
    if len(ranks) <= MAX_BARS:
        return list(ranks)
    by_speed = sorted(ranks, key=lambda means: means.work_s)
    return [by_speed[round(index * (len(ranks) - 1) / (MAX_BARS - 1))] for index in range(MAX_BARS)]
