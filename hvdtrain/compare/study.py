"""The numbers of a scaling study: one program at several sizes, the results of each, and the recommended size.

Speed-up of N ranks: images/s of N over images/s of the smallest measured size, times that size's ranks. Efficiency:
speed-up over N. Hours are ranks x wall time of one run, without the launcher's start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.compare import groups
from hvdtrain.compare import runs as runfolder
from hvdtrain.compare.groups import Group
from hvdtrain.compare.metrics import ACCURACY, Metric, best_metric
from hvdtrain.compare.runs import FINISHED, Run, UnusableFileError, parse_json
from hvdtrain.compare.spread import Mean, compare_means, compute_mean
from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.files import read_file

# Settings that follow from the number of ranks: they do not make two sizes different programs.
_SIZE_SETTINGS = {
    "np",
    "hosts",
    "device",
    "global_batch",
    "batch_size_per_rank",
    "accumulate_steps",
    "steps_per_epoch",
    "peak_lr",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The results of all runs at one number of ranks."""

    np: int
    group: Group | None  # the finished runs; None if there are none
    missing_reasons: tuple[str, ...]  # for each other run, why it has no result
    target: float | None  # accuracy to reach, 0 to 1
    price: float | None  # of one rank for an hour

    @property
    def runs(self) -> tuple[Run, ...]:
        return () if self.group is None else self.group.runs

    @property
    def speed(self) -> Mean | None:
        """Mean images/s, or the runs' own unit per second; None also for 0, which cannot be a baseline."""
        return _positive(None if self.group is None else self.group.speed())

    def mean(self, name: str) -> Mean | None:
        """The mean of a number of result.json."""
        return None if self.group is None else self.group.mean(name)

    @property
    def time_s(self) -> Mean | None:
        return _positive(self.mean("wall_time_s"))

    def metric(self, metric: Metric) -> Mean | None:
        """The mean of a metric of the last test."""
        return None if self.group is None else self.group.metric(metric)

    @property
    def accuracy(self) -> Mean | None:
        """Mean test accuracy in percent."""
        return self.metric(ACCURACY)

    @property
    def steps(self) -> Mean | None:
        return self.mean("steps")

    @property
    def hours(self) -> float | None:
        """The hours of all ranks together, for one run."""
        return None if self.time_s is None else self.np * self.time_s.mean / 3600

    @property
    def cost(self) -> float | None:
        """The cost of one run."""
        return None if self.hours is None or self.price is None else self.hours * self.price

    def times_to_target_s(self) -> list[float | None]:
        """For each run the time of the first evaluation that reached the target; None if none did."""
        assert self.target is not None
        reached = [[point for point in run.curve("eval/accuracy") if point.value >= self.target] for run in self.runs]
        return [points[0].seconds if points else None for points in reached]

    def batch(self) -> float | None:
        """The global batch; None if the runs differ in it."""
        batches = {run.number("global_batch") for run in self.runs}
        return batches.pop() if len(batches) == 1 else None

    def remark(self) -> str:
        """Why runs have no result; empty if all have one."""
        if not self.missing_reasons:
            return ""
        missing = len(self.missing_reasons)
        prefix = f"{missing} of {len(self.runs) + missing} runs: " if self.runs else ""
        return prefix + "; ".join(dict.fromkeys(self.missing_reasons))


@dataclass(frozen=True, kw_only=True)
class Study:
    """A sweep.json, and the run folders it names."""

    name: str
    program: str
    mode: str  # weak or strong
    sizes: tuple[Size, ...]  # in rising order of their ranks
    target_percent: float | None
    price: float | None
    min_efficiency: float | None  # percent
    max_loss: float | None  # percentage points

    @property
    def measured_sizes(self) -> list[Size]:
        return [size for size in self.sizes if size.speed is not None]

    @property
    def unit(self) -> str:
        """The unit of the speed."""
        return next((size.group.unit for size in self.sizes if size.group is not None), "images")

    @property
    def runs(self) -> list[Run]:
        return [run for size in self.sizes for run in size.runs]

    @property
    def best(self) -> Metric:
        """The metric by which the task selects its best weights."""
        return best_metric(self.runs)

    @property
    def uses_gpus(self) -> bool:
        return any(run.uses_gpus for run in self.runs)

    def speed_up(self, size: Size) -> float | None:
        """Return the speed-up relative to the smallest measured size, which has its number of ranks."""
        if size.speed is None:
            return None
        base = self.measured_sizes[0]
        assert base.speed is not None
        return base.np * size.speed.mean / base.speed.mean

    def efficiency(self, size: Size) -> float | None:
        """Return the speed-up over ranks, in percent."""
        speed_up = self.speed_up(size)
        return None if speed_up is None else 100 * speed_up / size.np


def read_study(file: Path, complaints: list[str]) -> Study:
    """Read the study of a sweep.json; BadInput if it is not one. `complaints` gets a line for everything missing."""
    try:
        document = parse_json(file, read_file(file))
        rank_counts = {int(np) for np in document["sizes"]} | {int(row["np"]) for row in document["runs"]}
        if min(rank_counts, default=1) < 1:
            raise ValueError(f"a size of {min(rank_counts)} ranks")
        rows = [
            {**row, "run_folder": Path(row["run_folder"]) if row.get("run_folder") else None}
            for row in document["runs"]
        ]
        numbers = {
            name: None if document.get(name) is None else float(document[name])
            for name in ("price_per_gpu_hour", "target_accuracy", "min_efficiency", "max_accuracy_loss")
        }
        program, mode = " ".join(map(str, document["program"])), str(document["mode"])
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}). Pass the sweep.json of a study.") from error
    except UnusableFileError as error:
        raise BadInput(f"{error}. Run hvdlaunch sweep again.") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadInput(f"{file}: not the sweep.json of a study ({error!r}). Run hvdlaunch sweep again.") from error
    target = numbers["target_accuracy"]
    sizes = [
        _read_size(
            np,
            [row for row in rows if row["np"] == np],
            target=None if target is None else target / 100,
            price=numbers["price_per_gpu_hour"],
            complaints=complaints,
        )
        for np in sorted(rank_counts)
    ]
    return Study(
        name=file.resolve().parent.name,
        program=program,
        mode=mode,
        sizes=tuple(sizes),
        target_percent=target,
        price=numbers["price_per_gpu_hour"],
        min_efficiency=numbers["min_efficiency"],
        max_loss=numbers["max_accuracy_loss"],
    )


def _read_size(
    np: int, rows: Sequence[dict[str, Any]], *, target: float | None, price: float | None, complaints: list[str]
) -> Size:
    runs, missing_reasons = [], [] if rows else ["not run yet"]
    for row in rows:
        folder = row["run_folder"]
        has_result = folder is not None and (folder / "result.json").is_file()
        run = runfolder.read_run(folder, complaints) if has_result else None
        if (reason := _missing_reason(row, run, np)) is not None:
            missing_reasons.append(reason)
        elif run is not None:
            runs.append(run)
    run_groups = groups.group_runs(runs)
    if len(run_groups) > 1:
        names = ", ".join(groups.differing_settings(runs)) or "what is unknown"
        missing_reasons.append(f"not averaged, for they differ in {names}")
        run_groups = []
    return Size(
        np=np,
        group=Group(name=f"{np} rank{'' if np == 1 else 's'}", runs=run_groups[0].runs) if run_groups else None,
        missing_reasons=tuple(missing_reasons),
        target=target,
        price=price,
    )


def _missing_reason(row: dict[str, Any], run: Run | None, np: int) -> str | None:
    """Why this run has no result; None if it has one."""
    folder = row["run_folder"]
    if row.get("status") or row.get("why"):
        return str(row.get("why") or f"it ended with status {row['status']}")
    if folder is None:
        return "it named no run folder"
    if run is None or not run.result:
        return f"no result.json that can be read in {folder}"
    if run.exit_reason != FINISHED:
        return f"it ended before it was finished: {run.exit_reason}"
    if run.number("np") != np:
        return f"{folder} holds a run of {run.result.get('np')} ranks: another run has replaced this one"
    return None


def remarks(study: Study) -> list[str]:
    """Return notes on what makes the sizes hard to compare, and on each size's average."""
    lines = [line for line in (_broken_mode(study), _other_settings(study)) if line]
    lines += groups.remarks([size.group for size in study.sizes if size.group is not None])
    return lines


def _broken_mode(study: Study) -> str | None:
    """The sizes whose batch does not fit the mode; None if all do."""
    if study.mode not in ("weak", "strong") or not study.measured_sizes:
        return None
    batches = {
        size.np: (size.batch() or math.nan) / (size.np if study.mode == "weak" else 1) for size in study.measured_sizes
    }
    first, usual = next(iter(batches.items()))
    exceptions = [f"{np} ranks had {batch:g}" for np, batch in batches.items() if batch != usual]
    what = f"{study.unit} per rank and step" if study.mode == "weak" else f"{study.unit} per step"
    if not exceptions:
        return None
    return (
        f"Not {study.mode} scaling: {', '.join(exceptions)} {what}, {first} rank{'' if first == 1 else 's'} {usual:g}."
    )


def _other_settings(study: Study) -> str | None:
    runs = [run for size in study.measured_sizes for run in size.runs]
    names = [name for name in groups.differing_settings(runs) if name not in _SIZE_SETTINGS]
    values = [f"{name} ({', '.join(dict.fromkeys(run.settings.get(name, '-') for run in runs))})" for name in names]
    return f"The sizes differ in more than their ranks: {'; '.join(values)}." if values else None


def advice(study: Study) -> list[str]:
    """The largest size inside the limits, why larger ones break them, and the next doubling; one line each."""
    if not study.measured_sizes:
        return ["No size has a result yet: nothing can be advised."]
    best = advised_size(study)
    if best is None:
        lines = ["No size is advised without limits: give --min-efficiency, --max-accuracy-loss or both."]
    else:
        lines = _describe_advice(study, best)
    return lines + [line for line in [_next_doubling(study)] if line]


def advised_size(study: Study) -> Size | None:
    """The largest size inside the limits; None without limits or results."""
    if not study.measured_sizes or (study.min_efficiency is None and study.max_loss is None):
        return None
    return [size for size in study.measured_sizes if not _broken_limits(study, size)][-1]  # the smallest breaks none


def _describe_advice(study: Study, best: Size) -> list[str]:
    reasons_by_size = {size.np: _broken_limits(study, size) for size in study.measured_sizes}
    limits = [f"an efficiency of at least {study.min_efficiency:g} %"] if study.min_efficiency is not None else []
    if study.max_loss is not None:
        limits.append(f"an accuracy loss of at most {_points(study.max_loss)}")
    outcome = f"{study.efficiency(best):.1f} %{_best_change(study, best)}"
    lines = [f"Advice: {_ranks(best.np)}, the largest size with {' and '.join(limits)} ({outcome})."]
    lines += [f"{_ranks(np)}: {', '.join(reasons)}." for np, reasons in reasons_by_size.items() if reasons]
    return lines


def _broken_limits(study: Study, size: Size) -> list[str]:
    """The limits that a size breaks, as text."""
    reasons = []
    efficiency = study.efficiency(size)
    if study.min_efficiency is not None and efficiency is not None and efficiency < study.min_efficiency:
        reasons.append(f"efficiency {efficiency:.1f} % is below {study.min_efficiency:g} %")
    base = study.measured_sizes[0].accuracy
    if study.max_loss is not None and size is not study.measured_sizes[0]:
        if base is None or size.accuracy is None:
            reasons.append("its accuracy is not known")
        elif base.mean - size.accuracy.mean > study.max_loss:
            remark = {
                "inside": ", though inside the spread over seeds",
                "outside": "",
                "unknown": ", though the spread over seeds is not known",
            }[compare_means(size.accuracy, base).kind]
            lost = base.mean - size.accuracy.mean
            reasons.append(f"its accuracy is {lost:.2f} points lower, the limit is {study.max_loss:g}{remark}")
    return reasons


def _best_change(study: Study, size: Size) -> str:
    """Describe how the best metric differs from that of the smallest size; empty for that size itself."""
    metric, base = study.best, study.measured_sizes[0]
    mean, base_mean = size.metric(metric), base.metric(metric)
    if size is base or base_mean is None or mean is None:
        return ""
    name = "" if metric.unit else f" {metric.name}"
    return f",{name} {metric.format_change(mean.mean - base_mean.mean)}{metric.unit} against {_ranks(base.np)}"


def _next_doubling(study: Study) -> str | None:
    """Predict twice the largest size, by the power law through the last two; None with fewer than two."""
    if len(study.measured_sizes) < 2:
        return None
    before, last = study.measured_sizes[-2:]
    doublings = math.log2(last.np / before.np)
    assert before.speed is not None
    assert last.speed is not None
    efficiency = study.efficiency(last)
    assert efficiency is not None
    gain = (last.speed.mean / before.speed.mean) ** (1 / doublings)
    predictions = [f"efficiency about {efficiency * gain / 2:.0f} %"]
    if before.time_s is not None and last.time_s is not None and last.hours is not None:
        time_s = last.time_s.mean * (last.time_s.mean / before.time_s.mean) ** (1 / doublings)
        hours = 2 * last.np * time_s / 3600
        predictions.insert(0, f"about {time_s:.3g} s in place of {last.time_s.mean:.3g}")
        predictions.append(f"{hours:.2g} {'GPU' if study.uses_gpus else 'rank'}-hours in place of {last.hours:.2g}")
        if study.price is not None and last.cost is not None:
            predictions.append(f"cost {hours * study.price:.3g} in place of {last.cost:.3g}")
    source = f"extrapolated from {before.np} and {last.np}"
    return f"The next doubling, {_ranks(2 * last.np)}: {', '.join(predictions)}; {source}."


def _points(number: float) -> str:
    return f"{number:g} point{'' if number == 1 else 's'}"


def _ranks(np: int) -> str:
    return f"{np} rank{'' if np == 1 else 's'}"


def _positive(mean: Mean | None) -> Mean | None:
    return mean if mean is not None and mean.mean > 0 else None


def mean_time_to_target(size: Size) -> Mean | None:
    """Mean seconds to the target; None if a run has not reached it."""
    times = size.times_to_target_s()
    reached = [time for time in times if time is not None]
    return compute_mean(reached) if len(reached) == len(times) else None
