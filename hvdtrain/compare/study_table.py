"""A scaling study as table, picture and TensorBoard events, next to its sweep.json."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hvdtrain.compare import drawings, groups, spread, study, terminal
from hvdtrain.compare.digits import format_integer, format_three_digits
from hvdtrain.compare.files import write_all
from hvdtrain.compare.metrics import LOSS, metrics_of
from hvdtrain.compare.runs import MISSING
from hvdtrain.compare.spread import Mean
from hvdtrain.compare.study import Size, Study
from hvdtrain.compare.tables import (
    Column,
    mean_column,
    to_csv,
    to_markdown,
)


def compare(file: Path) -> tuple[str, list[str]]:
    """Write the results of the study at `file`; return the text to print and a line for everything missing."""
    complaints: list[str] = []
    result = study.read_study(file, complaints)
    columns = table(result)
    verdicts = groups.verdicts([size.group for size in result.sizes if size.group is not None])
    lines = [
        f"- {verdict.quantity} of {verdict.group}: {verdict.text}"
        for verdict in verdicts
        if verdict.quantity != groups.TIME
    ]
    notes = study.remarks(result)
    if lines:
        lines = [f"Against {verdicts[0].base}:", *lines]
        notes.append(spread.RULE)
    text = "".join(f"{line}\n\n" for line in study.advice(result))
    text += "".join(f"{line}\n" for line in lines) + "\n" * bool(lines)
    text += "\n\n".join(notes) + "\n" * bool(notes)
    whole_text = f"{to_markdown(columns)}\n{text}"
    picture = drawings.to_png(drawings.draw_scaling(result))
    files = {"table.md": whole_text.encode(), "table.csv": to_csv(columns).encode(), "scaling.png": picture}
    write_all(file.parent, files)
    _write_events(file.parent, result, whole_text, picture)
    return f"{terminal.format_study(columns)}\n{text}", complaints


def table(result: Study) -> list[Column]:
    """The columns of the study, one row for each size."""
    sizes = result.sizes
    hosts = [max((len(run.hosts) for run in size.runs), default=None) for size in sizes]
    counts = [len(size.runs) for size in sizes]
    unit = "GPU" if result.uses_gpus else "rank"
    metrics = [metric for metric in metrics_of(result.runs) if metric.name != LOSS or result.best.name == LOSS]
    columns = [
        _number_column("ranks", "np", [size.np for size in sizes], format_integer),
        _number_column("hosts", "hosts", hosts, format_integer),
        _number_column("n", "n", counts, format_integer),
        mean_column("time s", "wall_time_s", [size.time_s for size in sizes], format_three_digits),
        _number_column("speed-up", "speed_up", list(map(result.speed_up, sizes)), "{:.2f}".format),
        _number_column("efficiency", "efficiency_percent", list(map(result.efficiency, sizes)), "{:.1f} %".format),
        mean_column(f"{result.unit}/s", f"{result.unit}_per_s", [size.speed for size in sizes], format_three_digits),
        *(
            mean_column(metric.title, metric.column, [size.metric(metric) for size in sizes], metric.number_format)
            for metric in metrics
        ),
        mean_column("steps", "steps", [size.steps for size in sizes], format_integer),
    ]
    if result.target_percent is not None:
        columns.append(_target_column(result.target_percent, sizes))
    hours = [size.hours for size in sizes]
    columns.append(_number_column(f"{unit}-hours", f"{unit.lower()}_hours", hours, "{:.3g}".format))
    if result.price is not None:
        columns.append(_number_column("cost", "cost", [size.cost for size in sizes], "{:.3g}".format))
    if any(size.missing_reasons for size in sizes):
        texts = [size.remark() for size in sizes]
        columns.append(Column(title="remark", texts=texts, values={"remark": texts}))
    return columns


def _number_column(
    title: str, name: str, values: Sequence[float | None], number_format: Callable[[float], str]
) -> Column:
    texts = [MISSING if value is None else number_format(value) for value in values]
    return Column(title=title, texts=texts, values={name: values}, is_right_aligned=True)


def _target_column(percent: float, sizes: Sequence[Size]) -> Column:
    means = [study.mean_time_to_target(size) for size in sizes]
    column = mean_column(f"s to {percent:g} %", "seconds_to_target", means, format_three_digits)
    texts = list(column.texts)
    for row, (size, mean) in enumerate(zip(sizes, means, strict=True)):
        if size.runs and mean is None:
            times = size.times_to_target_s()
            texts[row] = f"not by {times.count(None)} of {len(times)}"
    return Column(title=column.title, texts=texts, values=column.values, is_right_aligned=True)


def _write_events(folder: Path, result: Study, text: str, picture: bytes) -> None:
    """Write one event file, replacing the previous one."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    def value_of(mean: Mean | None) -> float | None:
        return None if mean is None else mean.mean

    with TemporaryDirectory(dir=folder, prefix=".events-") as part_folder:
        writer = SummaryWriter(part_folder)
        for size in result.sizes:
            values = {
                "speed_up": result.speed_up(size),
                "efficiency_percent": result.efficiency(size),
                f"{result.unit}_per_s": value_of(size.speed),
                "wall_time_s": value_of(size.time_s),
                result.best.column: value_of(size.metric(result.best)),
                "hours": size.hours,
                "cost": size.cost,
            }
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(f"over_ranks/{name}", value, size.np)
        writer.add_text("study", f"`{result.program}`\n\n{text}")
        writer.add_image("scaling", np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")), dataformats="HWC")
        writer.close()
        for former in folder.glob("events.out.tfevents.*"):
            former.unlink()
        for new in Path(part_folder).iterdir():
            new.replace(folder / new.name)
