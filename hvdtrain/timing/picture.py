"""The mean step of every rank as a stacked bar."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain.timing.phases import PHASES, Phase
from hvdtrain.timing.verdict import NAMES, Profile, RankMeans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 16

# Input green, compute blue, communication red, the rest grey.
_COLOURS: dict[Phase, str] = {
    "read": "#1b7837",
    "augment": "#5aae61",
    "to_device": "#a6dba0",
    "forward": "#08519c",
    "loss": "#9ecae1",
    "backward": "#3182bd",
    "sync": "#d6604d",
    "optimizer": "#6baed6",
    "record": "#969696",
    "other": "#d9d9d9",
}


def draw(profile: Profile) -> "Figure":
    """Bars in milliseconds, the verdict above them; of many ranks MOST_BARS, from the fastest to the slowest."""
    from matplotlib.figure import Figure

    ranks = _chosen(profile.ranks)
    figure = Figure(figsize=(7, 2.9 + 0.5 * len(ranks)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
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
    axes.set_xlabel(f"ms per step, mean of {profile.ranks[0].steps} steps")
    axes.set_title(textwrap.fill(profile.verdict.sentence, 72), fontsize=11, loc="left")
    figure.legend(loc="outside lower center", ncols=4, fontsize=10, frameon=False)
    return figure


def _chosen(ranks: Sequence[RankMeans]) -> list[RankMeans]:
    if len(ranks) <= MOST_BARS:
        return list(ranks)
    by_speed = sorted(ranks, key=lambda means: means.own_s)
    return [by_speed[round(place * (len(ranks) - 1) / (MOST_BARS - 1))] for place in range(MOST_BARS)]
