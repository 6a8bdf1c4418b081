"""A scaling study as table and picture, next to its sweep.json."""

from collections.abc import Callable
from pathlib import Path

from hvdtrain.insight.compare import drawings, groups, study
from hvdtrain.insight.compare.metrics import LOSS, metrics_of
from hvdtrain.insight.compare.spread import Mean
from hvdtrain.insight.compare.study import RecordedStudy, ScalingPoint
from hvdtrain.insight.compare.tables import (
    TableColumn,
    mean_column,
    metric_column,
    number_column,
    to_csv,
    to_markdown,
    write_all,
)
from hvdtrain.insight.compare.texts import format_digits, format_integer


def compare(file: Path) -> tuple[str, list[str]]:
    """Write the results of the study at `file`; return the text to print and a line for everything missing."""
    complaints: list[str] = []
    result = study.read_study(file, complaints)
    columns = table(result)
    verdicts = groups.verdicts(result.sizes, of_time=False)
    parts = [*study.advice(result), "\n".join(verdicts), *study.remarks(result)]
    text = "\n".join([to_markdown(columns), *(f"{part}\n" for part in parts if part)])
    picture = drawings.to_png(drawings.draw_scaling(result))
    files = {"table.md": text.encode(), "table.csv": to_csv(columns).encode(), "scaling.png": picture}
    write_all(file.parent, files, f"Make it writable, or copy {file.name} elsewhere.")
    return text, complaints


def table(result: RecordedStudy) -> list[TableColumn]:
    """The columns of the study, one row for each size."""
    sizes = result.sizes
    hosts = [max((len(run.hosts) for run in size.runs), default=None) for size in sizes]
    metrics = [metric for metric in metrics_of(result.runs) if metric.name != LOSS or result.best.name == LOSS]
    unit = "GPU" if result.uses_gpus else "rank"
    hours = [size.hours for size in sizes]

    def means_of(quantity: Callable[[ScalingPoint], Mean | None]) -> list[float | None]:
        return [None if (mean := quantity(size)) is None else mean.mean for size in sizes]

    columns = [
        number_column("ranks", "np", [size.np for size in sizes]),
        number_column("hosts", "hosts", hosts),
        number_column("n", "n", [len(size.runs) for size in sizes]),
        mean_column("time s", "wall_time_s", [size.time_s for size in sizes], format_digits),
        number_column("speed-up", "speed_up", means_of(result.speed_up), "{:.2f}".format),
        number_column("efficiency", "efficiency_percent", means_of(result.efficiency), "{:.1f} %".format),
        mean_column(f"{result.unit}/s", f"{result.unit}_per_s", [size.speed for size in sizes], format_digits),
        *(metric_column(metric, [size.metric(metric) for size in sizes]) for metric in metrics),
        mean_column("steps", "steps", [size.mean("steps") for size in sizes], format_integer),
        number_column(f"{unit}-hours", f"{unit.lower()}_hours", hours, "{:.3g}".format),
    ]
    if (target := result.target) is not None:
        best = result.best
        times = [size.time_to_s(best, target) for size in sizes]
        title = f"s to {best.scale * target:g} %" if best.scale == 100 else f"s to {best.name} {target:g}"
        columns.append(mean_column(title, "seconds_to_target", times, format_digits))
    if result.price is not None:
        columns.append(number_column("cost", "cost", list(map(result.cost, hours)), "{:.3g}".format))
    if any(size.missing_reasons for size in sizes):
        columns.append(TableColumn(title="remark", texts=[size.remark() for size in sizes]))
    return columns
