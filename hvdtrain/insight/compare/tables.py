"""A table, as Markdown for users and as CSV for programs; the files of a comparison, each written atomically."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.insight.compare.metrics import Metric
from hvdtrain.insight.compare.spread import Mean
from hvdtrain.insight.compare.texts import MISSING, format_integer
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.files import write_atomically

Value = str | float | None


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """One column of a table."""

    title: str  # with its unit
    texts: Sequence[str]  # one for each row
    values: dict[str, Sequence[Value]] = field(default_factory=dict)  # columns of the CSV; none: title and texts
    is_right_aligned: bool = False  # aligned to the right, for numbers
    is_setting: bool = False  # a setting, not a result


def mean_column(
    title: str, name: str, means: Sequence[Mean | None], number_format: Callable[[float], str]
) -> TableColumn:
    """Return a column of mean +- deviation; in the CSV two columns, `name` and `name_deviation`."""
    texts = [MISSING if mean is None else number_format(mean.mean) + _deviation(mean, number_format) for mean in means]
    values: dict[str, Sequence[Value]] = {
        name: [None if mean is None else mean.mean for mean in means],
        f"{name}_deviation": [None if mean is None else mean.deviation for mean in means],
    }
    return TableColumn(title=title, texts=texts, values=values, is_right_aligned=True)


def metric_column(metric: Metric, means: Sequence[Mean | None]) -> TableColumn:
    """Return the column of a metric."""
    return mean_column(metric.title, metric.column, means, metric.number_format)


def number_column(
    title: str, name: str, numbers: Sequence[float | None], number_format: Callable[[float], str] = format_integer
) -> TableColumn:
    """Return a column of numbers; in the CSV it is `name`."""
    texts = [MISSING if number is None else number_format(number) for number in numbers]
    return TableColumn(title=title, texts=texts, values={name: numbers}, is_right_aligned=True)


def _deviation(mean: Mean, number_format: Callable[[float], str]) -> str:
    """Return the deviation with as many decimals as the mean; empty for a count that is equal in all runs."""
    if mean.deviation is None or (number_format is format_integer and not mean.deviation):
        return ""
    return f" ± {mean.deviation:.{len(number_format(mean.mean).partition('.')[2])}f}"


def to_markdown(columns: Sequence[TableColumn]) -> str:
    """The table in Markdown, padded so that people can read it as text."""
    columns_of_cells = []
    for column in columns:
        cells = [text.replace("|", "\\|") for text in (column.title, *column.texts)]
        width = max(3, *map(len, cells))
        rule = f"{'-' * (width - 1)}{':' if column.is_right_aligned else '-'}"
        align = str.rjust if column.is_right_aligned else str.ljust
        columns_of_cells.append([align(cells[0], width), rule, *(align(cell, width) for cell in cells[1:])])
    return "".join(f"| {' | '.join(row)} |\n" for row in zip(*columns_of_cells, strict=True))


def to_csv(columns: Sequence[TableColumn]) -> str:
    """The table as CSV, with plain numbers; a missing number is an empty field."""
    fields = [pair for column in columns for pair in (column.values or {column.title: column.texts}).items()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in fields])
    writer.writerows(zip(*(values for _, values in fields), strict=True))
    return out.getvalue()


def write_all(folder: Path, files: Mapping[str, bytes], remedy: str = "Choose another --out.") -> None:
    """Write each file; BadInput with this remedy if the folder cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written ({error.strerror or error}). {remedy}") from error
