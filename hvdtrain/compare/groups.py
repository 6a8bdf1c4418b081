"""Groups of runs that are averaged, what keeps the groups apart, and whether their results differ."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.compare.runs import FINISHED, MISSING, Run
from hvdtrain.compare.spread import Difference, Mean, difference, mean_of
from hvdtrain.compare.tables import in_one_line, shortened, three_digits

LABEL_SETTINGS = 3  # in a legend

What = Literal["accuracy", "time"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in the seed alone, in the order in which they were found."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> bool:
        return self.runs[0].ended == FINISHED

    def mean(self, name: str) -> Mean | None:
        """The mean of a number of result.json; None if no run has it."""
        return mean_of([value for run in self.runs if (value := run.number(name)) is not None])

    @property
    def unit(self) -> str:
        """What the speed is told in."""
        return next((run.unit for run in self.runs if run.unit), "images")

    def speed(self) -> Mean | None:
        """The mean of images/s, or of what the runs are told in."""
        return self.mean(f"train_{self.unit}_per_s")

    def accuracy(self) -> Mean | None:
        """The mean test accuracy in percent; None if no run has it."""
        return mean_of([100 * value for run in self.runs if (value := run.number("eval_accuracy")) is not None])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether two groups differ by more than the spread over seeds."""

    here: str
    base: str
    what: What
    kind: Literal["inside", "outside", "unknown"]
    change: str  # with its unit
    text: str  # the change, its interval, and whether it is more than that spread


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Finished runs with the same settings, versions and size; any other run stays alone."""
    by_settings: dict[object, list[Run]] = {}
    for run in runs:
        key = tuple(sorted(run.settings.items())) if run.settings and run.ended == FINISHED else run.folder
        by_settings.setdefault(key, []).append(run)
    names = [run.name for run in runs]
    return [
        Group(name=_group_name([run.name for run in members], names), runs=tuple(members))
        for members in by_settings.values()
    ]


def _group_name(names: Sequence[str], all_names: Sequence[str]) -> str:
    """A shell pattern that matches these names and no others, else the first name and how many more there are."""
    if len(names) == 1:
        return names[0]
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in same)
    matched = sum(name.startswith(prefix) for name in all_names)
    return f"{prefix}*" if matched == len(names) and prefix else f"{names[0]} and {len(names) - 1} more"


def differing(runs: Sequence[Run]) -> list[str]:
    """Names of the settings that are not the same in all runs; the number of ranks and hosts first."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings)
    return [name for name in names if len({settings.get(name, MISSING) for settings in known}) > 1]


def differing_by_choice(groups: Sequence[Group]) -> list[str]:
    """The settings that differ without those that follow from others, unless there are only such."""
    runs = [run for group in groups for run in group.runs]
    names = differing(runs)
    derived = frozenset[str]().union(*(run.derived for run in runs))
    return [name for name in names if name not in derived] or names


def labels(groups: Sequence[Group]) -> list[str]:
    """The name of each group with the first settings that differ."""
    names = differing_by_choice(groups)[:LABEL_SETTINGS]
    texts = [shortened([group.runs[0].settings.get(name, MISSING) for group in groups]) for name in names]
    values = [
        ", ".join(f"{name} {text[place]}" for name, text in zip(names, texts, strict=True))
        for place in range(len(groups))
    ]
    return [
        in_one_line(f"{group.name}: {text}" if text else group.name) for group, text in zip(groups, values, strict=True)
    ]


def refusal(groups: Sequence[Group]) -> str | None:
    """Why these groups are not averaged together; None if there is only one."""
    if len(groups) < 2:
        return None
    runs = [run for group in groups for run in group.runs]
    reasons = [
        f"{name} ({', '.join(dict.fromkeys(run.settings.get(name, MISSING) for run in runs if run.settings))})"
        for name in differing(runs)
    ]
    if len(ends := dict.fromkeys(run.ended for run in runs)) > 1:
        reasons.append(f"how they ended ({', '.join('no result' if end == MISSING else end for end in ends)})")
    if unknown := [run.name for run in runs if not run.settings]:
        reasons.append(f"settings that are unknown ({', '.join(unknown)})")
    return f"Not averaged over each other: {len(groups)} groups, which differ in {'; '.join(reasons)}."


def remarks(groups: Sequence[Group]) -> list[str]:
    """What a reader of the averages should know."""
    lines = []
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            repeated = ", ".join(str(seed) for seed, count in Counter(seeds).items() if count > 1)
            lines.append(
                f"{group.name}: {len(seeds)} runs, but seed {repeated} more than once: not the spread over seeds."
            )
        if len(places := dict.fromkeys(" ".join(run.hosts) for run in group.runs)) > 1:
            lines.append(f"{group.name}: on different hosts ({'; '.join(places)}): times include their difference.")
        if not group.finished and group.runs[0].result:
            lines.append(f"{group.name}: {group.runs[0].ended}, so its results are held against no others.")
    return lines


def verdicts(groups: Sequence[Group]) -> list[Verdict]:
    """Compare each finished group with the first one: accuracy, then time."""
    finished = [group for group in groups if group.finished]
    found = []
    for group in finished[1:]:
        base = finished[0]
        for what, here, there in _compared(group, base):
            change = difference(here, there)
            size = _change_in_words(what, change, there)
            text = f"{size}: {_interval_in_words(what, change, here, there)}"
            found.append(Verdict(here=group.name, base=base.name, what=what, kind=change.kind, change=size, text=text))
    return found


def _compared(group: Group, base: Group) -> Iterator[tuple[What, Mean, Mean]]:
    accuracies, times = (group.accuracy(), base.accuracy()), (group.mean("wall_time_s"), base.mean("wall_time_s"))
    if accuracies[0] and accuracies[1]:
        yield "accuracy", accuracies[0], accuracies[1]
    if times[0] and times[1]:
        yield "time", times[0], times[1]


def _change_in_words(what: What, change: Difference, base: Mean) -> str:
    if what == "accuracy":
        return f"{change.change:+.2f} points"
    share = f" ({100 * change.change / base.mean:+.0f} %)" if base.mean else ""
    return f"{_signed(change.change)} s{share}"


def _interval_in_words(what: What, change: Difference, here: Mean, base: Mean) -> str:
    """The interval of a difference, and whether it is more than the spread over seeds."""
    form, unit = ("{:+.2f}".format, "") if what == "accuracy" else (_signed, " s")
    low, high = (form(change.change + sign * (change.half_width or 0)) for sign in (-1, 1))
    interval = f"95 % interval {low} to {high}{unit}"
    if change.kind == "inside":
        return f"inside the spread over seeds, no difference shown ({interval})"
    if change.kind == "outside":
        return f"outside the spread over seeds ({interval})"
    if 1 in (here.n, base.n):
        few = "n = 1" if here.n == base.n else f"n = {here.n} against {base.n}"
        return f"the spread over seeds is not known ({few}), so nothing can be said of it"
    return f"no spread at all in n = {here.n} and {base.n} runs, too few to tell it from chance"


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{three_digits(abs(value))}"
