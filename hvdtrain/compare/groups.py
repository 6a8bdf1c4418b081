"""Groups of runs that are averaged: how groups are separated, and whether their results differ."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.compare.digits import format_three_digits
from hvdtrain.compare.metrics import Metric, best_metric
from hvdtrain.compare.runs import FINISHED, MISSING, Run
from hvdtrain.compare.spread import Difference, Mean, compare_means, compute_mean
from hvdtrain.compare.tables import escape_line, shorten

LABEL_SETTINGS = 3  # in a legend

TIME = "time"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ only in the seed, in the order in which they were found."""

    name: str
    runs: tuple[Run, ...]

    @property
    def is_finished(self) -> bool:
        return self.runs[0].exit_reason == FINISHED

    def mean(self, name: str) -> Mean | None:
        """The mean of a number of result.json; None if no run has it."""
        return compute_mean([value for run in self.runs if (value := run.number(name)) is not None])

    @property
    def unit(self) -> str:
        """The unit of the speed."""
        return next((run.unit for run in self.runs if run.unit), "images")

    def speed(self) -> Mean | None:
        """The mean of images/s, or of the unit of the runs per second."""
        return self.mean(f"train_{self.unit}_per_s")

    def metric(self, metric: Metric) -> Mean | None:
        """The mean of a metric of the last test, as it is shown; None if no run has it."""
        return compute_mean([value for run in self.runs if (value := metric.value(run)) is not None])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether two groups differ by more than the spread over seeds."""

    group: str
    base: str
    quantity: str  # the name of a metric, or TIME
    kind: Literal["inside", "outside", "unknown"]
    change: str  # with its unit
    text: str  # the change, its interval, and whether it exceeds the spread


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group finished runs with equal settings, versions and size; any other run is a group by itself."""
    by_settings: dict[object, list[Run]] = {}
    for run in runs:
        key = tuple(sorted(run.settings.items())) if run.settings and run.exit_reason == FINISHED else run.folder
        by_settings.setdefault(key, []).append(run)
    names = [run.name for run in runs]
    return [
        Group(name=_group_name([run.name for run in members], names), runs=tuple(members))
        for members in by_settings.values()
    ]


def _group_name(names: Sequence[str], all_names: Sequence[str]) -> str:
    """Return a shell pattern that matches exactly these names, else the first name and the number of further ones."""
    if len(names) == 1:
        return names[0]
    common = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in common)
    matched = sum(name.startswith(prefix) for name in all_names)
    return f"{prefix}*" if matched == len(names) and prefix else f"{names[0]} and {len(names) - 1} more"


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the names of the settings that differ between runs; the numbers of ranks and hosts come first."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings)
    return [name for name in names if len({settings.get(name, MISSING) for settings in known}) > 1]


def chosen_settings(groups: Sequence[Group]) -> list[str]:
    """Return the differing settings without derived ones, unless all are derived."""
    runs = [run for group in groups for run in group.runs]
    names = differing_settings(runs)
    derived = frozenset[str]().union(*(run.derived for run in runs))
    return [name for name in names if name not in derived] or names


def labels(groups: Sequence[Group]) -> list[str]:
    """The name of each group with the first settings that differ."""
    names = chosen_settings(groups)[:LABEL_SETTINGS]
    texts = [shorten([group.runs[0].settings.get(name, MISSING) for group in groups]) for name in names]
    values = [
        ", ".join(f"{name} {text[index]}" for name, text in zip(names, texts, strict=True))
        for index in range(len(groups))
    ]
    return [
        escape_line(f"{group.name}: {text}" if text else group.name) for group, text in zip(groups, values, strict=True)
    ]


def separation_reason(groups: Sequence[Group]) -> str | None:
    """Why these groups are not averaged together; None if there is only one."""
    if len(groups) < 2:
        return None
    runs = [run for group in groups for run in group.runs]
    reasons = [
        f"{name} ({', '.join(dict.fromkeys(run.settings.get(name, MISSING) for run in runs if run.settings))})"
        for name in differing_settings(runs)
    ]
    if len(exit_reasons := dict.fromkeys(run.exit_reason for run in runs)) > 1:
        reasons.append(f"how they ended ({', '.join('no result' if end == MISSING else end for end in exit_reasons)})")
    if unknown := [run.name for run in runs if not run.settings]:
        reasons.append(f"settings that are unknown ({', '.join(unknown)})")
    return f"Not averaged over each other: {len(groups)} groups, which differ in {'; '.join(reasons)}."


def remarks(groups: Sequence[Group]) -> list[str]:
    """Return notes for a reader of the averages."""
    lines = []
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            repeated = ", ".join(str(seed) for seed, count in Counter(seeds).items() if count > 1)
            lines.append(
                f"{group.name}: {len(seeds)} runs, but seed {repeated} more than once: not the spread over seeds."
            )
        if len(host_lists := dict.fromkeys(" ".join(run.hosts) for run in group.runs)) > 1:
            lines.append(f"{group.name}: on different hosts ({'; '.join(host_lists)}): times include their difference.")
        if not group.is_finished and group.runs[0].result:
            lines.append(f"{group.name}: {group.runs[0].exit_reason}, so its results are held against no others.")
    return lines


def verdicts(groups: Sequence[Group]) -> list[Verdict]:
    """Compare each finished group with the first one: the best metric that both share, then time."""
    finished = [group for group in groups if group.is_finished]
    return [verdict for group in finished[1:] for verdict in _verdicts(group, finished[0])]


def _verdicts(group: Group, base: Group) -> Iterator[Verdict]:
    metric = best_metric(base.runs)
    pairs = (
        (metric.name, group.metric(metric), base.metric(metric), metric.format_change, metric.unit),
        (TIME, group.mean("wall_time_s"), base.mean("wall_time_s"), _signed, " s"),
    )
    for quantity, mean, base_mean, signed, unit in pairs:
        if mean is None or base_mean is None:
            continue
        difference = compare_means(mean, base_mean)
        change = f"{signed(difference.change)}{unit}"
        if quantity == TIME and base_mean.mean:
            change += f" ({100 * difference.change / base_mean.mean:+.0f} %)"
        text = f"{change}: {_format_interval(difference, mean, base_mean, signed, unit if quantity == TIME else '')}"
        yield Verdict(
            group=group.name, base=base.name, quantity=quantity, kind=difference.kind, change=change, text=text
        )


def _format_interval(change: Difference, mean: Mean, base: Mean, signed: Callable[[float], str], unit: str) -> str:
    """Format the interval of a difference, and whether it exceeds the spread over seeds."""
    low, high = (signed(change.change + sign * (change.half_width or 0)) for sign in (-1, 1))
    interval = f"95 % interval {low} to {high}{unit}"
    if change.kind == "inside":
        return f"inside the spread over seeds, no difference shown ({interval})"
    if change.kind == "outside":
        return f"outside the spread over seeds ({interval})"
    if 1 in (mean.n, base.n):
        counts = "n = 1" if mean.n == base.n else f"n = {mean.n} against {base.n}"
        return f"the spread over seeds is not known ({counts}), so nothing can be said of it"
    return f"no spread at all in n = {mean.n} and {base.n} runs, too few to tell it from chance"


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{format_three_digits(abs(value))}"
