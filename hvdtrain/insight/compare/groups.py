"""Groups of runs that are averaged: how groups are separated, and whether their results differ."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.insight.compare.metrics import Metric, best_metric
from hvdtrain.insight.compare.runs import FINISHED, RecordedRun
from hvdtrain.insight.compare.spread import RULE, Mean, compare_means, compute_mean
from hvdtrain.insight.compare.texts import MISSING, format_change, format_digits

TIME = "wall_time_s"
MAX_SETTINGS = 4  # that differ, on a terminal
_OF_TEST = ("data", "classes", "test_samples")  # settings of the test split


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Runs that differ only in the seed, in the order in which they were found; none is a group without results."""

    name: str
    runs: tuple[RecordedRun, ...]

    @property
    def is_finished(self) -> bool:
        return bool(self.runs) and self.runs[0].exit_reason == FINISHED

    def mean(self, name: str, scale: float = 1.0) -> Mean | None:
        """The mean of a number of result.json, times `scale`; None if no run has it."""
        return compute_mean([scale * value for run in self.runs if (value := run.number(name)) is not None])

    @property
    def unit(self) -> str:
        """The unit of the speed."""
        return next((run.unit for run in self.runs if run.unit), "images")

    def metric(self, metric: Metric) -> Mean | None:
        """The mean of a metric of the last test, as it is shown; None if no run has it."""
        return self.mean(f"eval_{metric.name}", metric.scale)


def group_runs(runs: Sequence[RecordedRun]) -> list[SeedGroup]:
    """Group finished runs with equal settings, versions and size; any other run is a group by itself."""
    by_settings: dict[object, list[RecordedRun]] = {}
    for run in runs:
        key = tuple(sorted(run.settings.items())) if run.settings and run.exit_reason == FINISHED else id(run)
        by_settings.setdefault(key, []).append(run)
    groups = []
    for members in by_settings.values():
        others = f" and {len(members) - 1} more" if len(members) > 1 else ""
        groups.append(SeedGroup(name=f"{members[0].name}{others}", runs=tuple(members)))
    return groups


def differing_settings(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the settings that differ between runs; the numbers of ranks and hosts come first."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings)
    return [name for name in names if len({settings.get(name, MISSING) for settings in known}) > 1]


def chosen_settings(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the first differing settings without derived ones, unless all are derived."""
    runs = [run for group in groups for run in group.runs]
    names = differing_settings(runs)
    derived = frozenset[str]().union(*(run.derived for run in runs))
    return ([name for name in names if name not in derived] or names)[:MAX_SETTINGS]


def remarks(groups: Sequence[SeedGroup]) -> list[str]:
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
        if resumed := sum(bool(run.number("resumed")) for run in group.runs):
            lines.append(f"{group.name}: {resumed} resumed: times leave out what was lost before.")
        metric = best_metric(group.runs)
        lost = sum(run.number(f"eval_{metric.name}") is None for run in group.runs)
        if 0 < lost < len(group.runs):
            name = f"{metric.name} of {lost} of {len(group.runs)} runs is missing or not a number"
            lines.append(f"{group.name}: {name} and is left out of the mean.")
    return lines


def verdicts(groups: Sequence[SeedGroup], *, of_time: bool = True) -> list[str]:
    """Compare the finished groups with the first one: the best metric and time, if the spread is known, then RULE."""
    finished = [group for group in groups if group.is_finished]
    if len(finished) < 2:
        return []
    base, lines = finished[0], []
    metric = best_metric(base.runs)
    for group in finished[1:]:
        names = f"of {group.name} against {base.name}"
        different = [name for name in differing_settings([group.runs[0], base.runs[0]]) if name in _OF_TEST]
        if different:
            lines.append(f"- {metric.name} {names}: not compared, since {' and '.join(different)} differ")
        else:
            lines += _describe_change(
                f"{metric.name} {names}", group.metric(metric), base.metric(metric), metric.number_format, metric.unit
            )
        if of_time:
            own, others = (sorted({host for run in one.runs for host in run.hosts}) for one in (group, base))
            where = "" if own == others else f" (on {', '.join(own)} and on {', '.join(others)})"
            lines += _describe_change(f"time {names}{where}", group.mean(TIME), base.mean(TIME), format_digits, " s")
    return [*lines, f"\n{RULE}"] if lines else [RULE]


def _describe_change(
    subject: str, mean: Mean | None, base: Mean | None, number_format: Callable[[float], str], unit: str
) -> list[str]:
    """Return a line on whether a difference exceeds the spread over seeds; none if the spread is not known."""
    difference = None if mean is None or base is None else compare_means(mean, base)
    if difference is None or difference.half_width is None:
        return []
    change, low, high = (
        format_change(difference.change + sign * difference.half_width, number_format) for sign in (0, -1, 1)
    )
    kind = f"{difference.kind} the spread over seeds"
    return [f"- {subject}: {change}{unit}: {kind} (95 % interval {low} to {high}{unit})"]
