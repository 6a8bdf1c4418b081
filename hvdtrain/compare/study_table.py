"""A scaling study as table, picture and TensorBoard events, beside its sweep.json."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hvdtrain.compare import drawings, groups, spread, study, terminal
from hvdtrain.compare.files import write_all
from hvdtrain.compare.runs import MISSING
from hvdtrain.compare.spread import Mean
from hvdtrain.compare.study import Size, Study
from hvdtrain.compare.tables import OF_TEXTS, Column, as_csv, markdown, measured, three_digits, whole


def compare(file: Path) -> tuple[str, list[str]]:
    """Write the results of the study at `file`; returns the text to print and a line for each missing thing."""
    complaints: list[str] = []
    found = study.read(file, complaints)
    columns = table(found)
    verdicts = groups.verdicts([size.group for size in found.sizes if size.group is not None])
    lines = [f"- accuracy of {verdict.here}: {verdict.text}" for verdict in verdicts if verdict.what == "accuracy"]
    notes = study.remarks(found)
    if lines:
        lines = [f"Against {verdicts[0].base}:", *lines]
        notes.append(spread.RULE)
    text = "".join(f"{line}\n\n" for line in study.advice(found))
    text += "".join(f"{line}\n" for line in lines) + "\n" * bool(lines)
    text += "\n\n".join(notes) + "\n" * bool(notes)
    whole_text = f"{markdown(columns)}\n{text}"
    picture = drawings.png(drawings.scaling(found))
    files = {"table.md": whole_text.encode(), "table.csv": as_csv(columns).encode(), "scaling.png": picture}
    write_all(file.parent, files)
    _write_events(file.parent, found, whole_text, picture)
    return f"{terminal.of_study(columns)}\n{text}", complaints


def table(found: Study) -> list[Column]:
    """The columns of the study, one row for each size."""
    sizes = found.sizes
    hosts = [max((len(run.hosts) for run in size.runs), default=None) for size in sizes]
    counts = [len(size.runs) for size in sizes]
    unit = "GPU" if found.on_gpus else "rank"
    of_texts = {one: [size.mean(one[1]) for size in sizes] for one in OF_TEXTS}
    columns = [
        _numbers("ranks", "np", [size.np for size in sizes], whole),
        _numbers("hosts", "hosts", hosts, whole),
        _numbers("n", "n", counts, whole),
        measured("time s", "wall_time_s", [size.time_s for size in sizes], three_digits),
        _numbers("speed-up", "speed_up", list(map(found.speed_up, sizes)), "{:.2f}".format),
        _numbers("efficiency", "efficiency_percent", list(map(found.efficiency, sizes)), "{:.1f} %".format),
        measured(f"{found.unit}/s", f"{found.unit}_per_s", [size.speed for size in sizes], three_digits),
        measured("accuracy %", "accuracy_percent", [size.accuracy for size in sizes], "{:.2f}".format),
        *(measured(title, name, means, form) for (title, name, form), means in of_texts.items() if any(means)),
        measured("steps", "steps", [size.steps for size in sizes], whole),
    ]
    if found.target_percent is not None:
        columns.append(_to_target(found.target_percent, sizes))
    hours = [size.hours for size in sizes]
    columns.append(_numbers(f"{unit}-hours", f"{unit.lower()}_hours", hours, "{:.3g}".format))
    if found.price is not None:
        columns.append(_numbers("cost", "cost", [size.cost for size in sizes], "{:.3g}".format))
    if any(size.lacking for size in sizes):
        texts = [size.remark() for size in sizes]
        columns.append(Column(title="remark", texts=texts, values={"remark": texts}))
    return columns


def _numbers(title: str, name: str, values: Sequence[float | None], number_format: Callable[[float], str]) -> Column:
    texts = [MISSING if value is None else number_format(value) for value in values]
    return Column(title=title, texts=texts, values={name: values}, right=True)


def _to_target(percent: float, sizes: Sequence[Size]) -> Column:
    means = [study.mean_time_to_target(size) for size in sizes]
    column = measured(f"s to {percent:g} %", "seconds_to_target", means, three_digits)
    texts = list(column.texts)
    for row, (size, mean) in enumerate(zip(sizes, means, strict=True)):
        if size.runs and mean is None:
            times = size.to_target_s()
            texts[row] = f"not by {times.count(None)} of {len(times)}"
    return Column(title=column.title, texts=texts, values=column.values, right=True)


def _write_events(folder: Path, found: Study, text: str, picture: bytes) -> None:
    """Write one event file, in place of the previous one."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    def value_of(mean: Mean | None) -> float | None:
        return None if mean is None else mean.mean

    with TemporaryDirectory(dir=folder, prefix=".events-") as beside:
        writer = SummaryWriter(beside)
        for size in found.sizes:
            values = {
                "speed_up": found.speed_up(size),
                "efficiency_percent": found.efficiency(size),
                f"{found.unit}_per_s": value_of(size.speed),
                "wall_time_s": value_of(size.time_s),
                "accuracy_percent": value_of(size.accuracy),
                "hours": size.hours,
                "cost": size.cost,
            }
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(f"over_ranks/{name}", value, size.np)
        writer.add_text("study", f"`{found.program}`\n\n{text}")
        writer.add_image("scaling", np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")), dataformats="HWC")
        writer.close()
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        for new in Path(beside).iterdir():
            new.replace(folder / new.name)
