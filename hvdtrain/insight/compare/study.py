"""The numbers of a scaling study: one program at several sizes, the results of each, and the recommended size.

Speed-up of N ranks: images/s of N over images/s of the smallest measured size, times that size's ranks. Efficiency:
speed-up over N. Hours are ranks x wall time of one run, without the launcher's start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.insight.compare import groups
from hvdtrain.insight.compare import runs as runfolder
from hvdtrain.insight.compare.groups import SeedGroup
from hvdtrain.insight.compare.metrics import ACCURACY, Metric, best_metric
from hvdtrain.insight.compare.runs import FINISHED, RecordedRun, read_json
from hvdtrain.insight.compare.spread import Mean, compare_means, compute_mean
from hvdtrain.insight.compare.texts import escape_line, format_change
from hvdtrain.settings.safety.exits import BadInput

# Settings that follow from the number of ranks: they do not make two sizes different programs.
_SIZE_SETTINGS = {
    "np",
    "hosts",
    "device",
    "threads",
    "global_batch",
    "batch_size_per_rank",
    "accumulate_steps",
    "micro_batch",
    "steps",
    "steps_per_epoch",
    "peak_lr",
}


@dataclass(frozen=True, kw_only=True)
class ScalingPoint(SeedGroup):
    """The finished runs at one number of ranks."""

    np: int
    missing_reasons: tuple[str, ...]  # for each other run, why it has no result

    @property
    def speed(self) -> Mean | None:
        """Mean images/s, or the runs' own unit per second; None also for 0, which cannot be a baseline."""
        speed = self.mean(f"train_{self.unit}_per_s")
        return speed if speed is not None and speed.mean > 0 else None

    @property
    def time_s(self) -> Mean | None:
        return self.mean("wall_time_s")

    @property
    def hours(self) -> float | None:
        """The hours of all ranks together, for one run."""
        return None if self.time_s is None else self.np * self.time_s.mean / 3600

    def time_to_s(self, metric: Metric, target: float) -> Mean | None:
        """Mean time of the first evaluation as good as the target; None if a run has not reached it."""
        sign = 1 if metric.higher_is_better else -1
        curves = [run.curve(f"eval/{metric.name}") for run in self.runs]
        reached = [
            [seconds for _, seconds, value in curve if seconds and sign * value >= sign * target] for curve in curves
        ]
        return compute_mean([times[0] for times in reached]) if all(reached) else None

    def remark(self) -> str:
        """Why runs have no result; empty if all have one."""
        missing = len(self.missing_reasons)
        prefix = f"{missing} of {len(self.runs) + missing} runs: " if self.runs and missing else ""
        return prefix + "; ".join(dict.fromkeys(self.missing_reasons))


@dataclass(frozen=True, kw_only=True)
class RecordedStudy:
    """A sweep.json, and the run folders it names."""

    name: str
    mode: str  # weak or strong
    sizes: tuple[ScalingPoint, ...]  # in rising order of their ranks
    shown_target: float | None  # of the best metric; accuracy as a share, or above 1 in percent
    price: float | None  # of one rank for an hour
    min_efficiency: float | None  # percent
    max_loss: float | None  # percentage points

    @property
    def measured_sizes(self) -> list[ScalingPoint]:
        return [size for size in self.sizes if size.speed is not None]

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for size in self.sizes for run in size.runs]

    @property
    def unit(self) -> str:
        """The unit of the speed."""
        return next((size.unit for size in self.sizes if size.runs), "images")

    @property
    def best(self) -> Metric:
        """The metric by which the task selects its best weights."""
        return best_metric(self.runs)

    @property
    def target(self) -> float | None:
        """The target in the unit of the task."""
        if self.shown_target is None or self.best.scale == 1 or self.shown_target <= 1:
            return self.shown_target
        return self.shown_target / self.best.scale

    @property
    def uses_gpus(self) -> bool:
        return any(run.uses_gpus for run in self.runs)

    def speed_up(self, size: ScalingPoint) -> Mean | None:
        """Return the speed-up relative to the smallest measured size, which has its number of ranks."""
        if size.speed is None:
            return None
        base = self.measured_sizes[0]
        assert base.speed is not None
        return size.speed.scaled(base.np / base.speed.mean)

    def efficiency(self, size: ScalingPoint) -> Mean | None:
        """Return the speed-up over ranks, in percent."""
        speed_up = self.speed_up(size)
        return None if speed_up is None else speed_up.scaled(100 / size.np)

    def cost(self, hours: float | None) -> float | None:
        """Return the price of these hours of a rank."""
        return None if hours is None or self.price is None else hours * self.price


def read_study(file: Path, complaints: list[str]) -> RecordedStudy:
    """Read the study of a sweep.json; BadInput if it is not one. `complaints` gets a line for everything missing."""
    try:
        document = read_json(file)
        rows = [{**row, "np": int(row["np"])} for row in document["runs"]]
        rank_counts = {int(np) for np in document["sizes"]} | {row["np"] for row in rows}
        if min(rank_counts, default=1) < 1:
            raise ValueError(f"a size of {min(rank_counts)} ranks")
        if document["mode"] not in ("weak", "strong"):
            raise ValueError(f"mode {document['mode']}")
        numbers = {
            name: None if document.get(name) is None else float(document[name])
            for name in ("price_per_gpu_hour", "target", "target_accuracy", "min_efficiency", "max_accuracy_loss")
        }
        return RecordedStudy(
            name=escape_line(file.resolve().parent.name),
            mode=document["mode"],
            sizes=tuple(
                _read_size(np, [row for row in rows if row["np"] == np], complaints) for np in sorted(rank_counts)
            ),
            shown_target=numbers["target_accuracy"] if numbers["target"] is None else numbers["target"],
            price=numbers["price_per_gpu_hour"],
            min_efficiency=numbers["min_efficiency"],
            max_loss=numbers["max_accuracy_loss"],
        )
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}). Pass the sweep.json of a study.") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadInput(f"{file}: not the sweep.json of a study ({error!r}). Run hvdlaunch sweep again.") from error


def _read_size(np: int, rows: Sequence[dict[str, Any]], complaints: list[str]) -> ScalingPoint:
    runs, missing_reasons = [], [] if rows else ["not run yet"]
    for row in rows:
        folder = Path(row["run_folder"]) if row.get("run_folder") else None
        has_result = folder is not None and (folder / "result.json").is_file()
        run = runfolder.read_run(folder, complaints) if folder is not None and has_result else None
        if (reason := _missing_reason(row, run, np)) is not None:
            missing_reasons.append(reason)
        elif run is not None:
            runs.append(run)
    if len(groups.group_runs(runs)) > 1:
        names = ", ".join(groups.differing_settings(runs)) or "what is unknown"
        missing_reasons.append(f"not averaged, for they differ in {names}")
        runs = []
    return ScalingPoint(
        name=_ranks(np), np=np, runs=tuple(runs), missing_reasons=tuple(map(escape_line, missing_reasons))
    )


def _missing_reason(row: dict[str, Any], run: RecordedRun | None, np: int) -> str | None:
    """Why this run has no result; None if it has one."""
    folder = row.get("run_folder")
    if row.get("status") or row.get("why"):
        return str(row.get("why") or f"it ended with status {row['status']}")
    if not folder:
        return "it named no run folder"
    if run is None or not run.result:
        return f"no result.json that can be read in {folder}"
    if run.exit_reason != FINISHED:
        return f"it ended before it was finished: {run.exit_reason}"
    if run.number("np") != np:
        return f"{folder} holds a run of {run.result.get('np')} ranks: another run has replaced this one"
    return None


def remarks(study: RecordedStudy) -> list[str]:
    """Return notes on what makes the sizes hard to compare, and on each size's average."""
    names = [name for name in groups.differing_settings(study.runs) if name not in _SIZE_SETTINGS]
    values = [
        f"{name} ({', '.join(dict.fromkeys(run.settings.get(name, '-') for run in study.runs))})" for name in names
    ]
    lines = [f"The sizes differ in more than their ranks: {'; '.join(values)}."] if values else []
    batches = {
        size.np: batch.mean / (size.np if study.mode == "weak" else 1)
        for size in study.sizes
        if (batch := size.mean("global_batch")) is not None
    }
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{_ranks(np)} had {batch:g}" for np, batch in batches.items())
        per = "per rank and step" if study.mode == "weak" else "per step"
        lines.append(f"Not {study.mode} scaling: {sizes} {study.unit} {per}.")
    return lines + groups.remarks(study.sizes)


def advice(study: RecordedStudy) -> list[str]:
    """The largest size inside the limits, and why larger ones break them; one line each."""
    if not study.measured_sizes:
        return ["No size has a result yet: nothing can be advised."]
    if (best := advised_size(study)) is None:
        return ["No size is advised without limits: give --min-efficiency, --max-accuracy-loss or both."]
    return _describe_advice(study, best)


def advised_size(study: RecordedStudy) -> ScalingPoint | None:
    """The largest size inside the limits; None without limits or results."""
    if not study.measured_sizes or (study.min_efficiency is None and study.max_loss is None):
        return None
    return [size for size in study.measured_sizes if not _broken_limits(study, size)][-1]  # the smallest breaks none


def _describe_advice(study: RecordedStudy, best: ScalingPoint) -> list[str]:
    limits = [f"an efficiency of at least {study.min_efficiency:g} %"] if study.min_efficiency is not None else []
    if study.max_loss is not None:
        limits.append(f"an accuracy loss of at most {study.max_loss:g} point{'' if study.max_loss == 1 else 's'}")
    efficiency, metric, base = study.efficiency(best), study.best, study.measured_sizes[0]
    assert efficiency is not None
    outcome = f"{efficiency.mean:.1f} %"
    mean, base_mean = best.metric(metric), base.metric(metric)
    if best is not base and mean is not None and base_mean is not None:
        name = "" if metric.unit else f" {metric.name}"
        change = format_change(mean.mean - base_mean.mean, metric.number_format)
        outcome += f",{name} {change}{metric.unit} against {_ranks(base.np)}"
    lines = [f"Advice: {_ranks(best.np)}, the largest size with {' and '.join(limits)} ({outcome})."]
    reasons_by_size = {size.np: _broken_limits(study, size) for size in study.measured_sizes}
    return lines + [f"{_ranks(np)}: {', '.join(reasons)}." for np, reasons in reasons_by_size.items() if reasons]


def _broken_limits(study: RecordedStudy, size: ScalingPoint) -> list[str]:
    """The limits that a size breaks, as text."""
    reasons: list[str] = []
    efficiency, base = study.efficiency(size), study.measured_sizes[0]
    if size is base:  # rounding may take its 100 % below a limit
        return reasons
    if study.min_efficiency is not None and efficiency is not None and efficiency.mean < study.min_efficiency:
        reasons.append(f"efficiency {efficiency.mean:.1f} % is below {study.min_efficiency:g} %")
    if study.max_loss is None:
        return reasons
    accuracy, base_accuracy = size.metric(ACCURACY), base.metric(ACCURACY)
    if accuracy is None or base_accuracy is None:
        reasons.append("its accuracy is not known")
    elif (lost := base_accuracy.mean - accuracy.mean) > study.max_loss:
        remark = {
            "inside": ", though inside the spread over seeds",
            "outside": "",
            "unknown": ", though the spread over seeds is not known",
        }[compare_means(accuracy, base_accuracy).kind]
        reasons.append(f"its accuracy is {lost:.2f} points lower, the limit is {study.max_loss:g}{remark}")
    return reasons


def _ranks(np: int) -> str:
    return f"{np} rank{'' if np == 1 else 's'}"
