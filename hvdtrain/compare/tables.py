"""A table, as Markdown for users and as CSV for programs."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdtrain.compare.digits import format_integer, format_three_digits
from hvdtrain.compare.runs import MISSING
from hvdtrain.compare.spread import Mean

MAX_LETTERS = 16  # of a setting if there is little room

Value = str | float | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str  # with its unit
    texts: Sequence[str]  # one for each row
    values: dict[str, Sequence[Value]] = field(default_factory=dict)  # columns of the CSV; none: title and texts
    is_right_aligned: bool = False  # aligned to the right, for numbers
    is_setting: bool = False  # a setting, not a result
    is_best: bool = False  # the metric by which runs are compared


def mean_column(
    title: str, name: str, means: Sequence[Mean | None], number_format: Callable[[float], str], *, is_best: bool = False
) -> Column:
    """Return a column of mean +- deviation; in the CSV two columns, `name` and `name_deviation`."""
    texts = [MISSING if mean is None else number_format(mean.mean) + _deviation(mean, number_format) for mean in means]
    values: dict[str, Sequence[Value]] = {
        name: [None if mean is None else mean.mean for mean in means],
        f"{name}_deviation": [None if mean is None else mean.deviation for mean in means],
    }
    return Column(title=title, texts=texts, values=values, is_right_aligned=True, is_best=is_best)


def _deviation(mean: Mean, number_format: Callable[[float], str]) -> str:
    """Return the deviation with as many decimals as the mean; empty for a count that is equal in all runs."""
    if mean.deviation is None or (number_format is format_integer and not mean.deviation):
        return ""
    return f" ± {mean.deviation:.{len(number_format(mean.mean).partition('.')[2].rstrip(' %'))}f}"


# For runs with measured power.
ENERGY = ("energy Wh", "energy_wh", format_three_digits)


def to_markdown(columns: Sequence[Column]) -> str:
    """The table in Markdown, padded so that people can read it as text."""
    widths = [max(3, len(column.title), *map(len, map(_cell, column.texts))) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column.is_right_aligned else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        f"{'-' * (width - 1)}{':' if column.is_right_aligned else '-'}"
        for width, column in zip(widths, columns, strict=True)
    ]
    rows = zip(*([_cell(text) for text in column.texts] for column in columns), strict=True)
    return "\n".join([line([column.title for column in columns]), line(rule), *map(line, rows)]) + "\n"


def _cell(text: str) -> str:
    return escape_line(text).replace("|", "\\|")


def escape_line(text: str) -> str:
    """Escape untrusted text: line ends, and characters that move the cursor."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))


def shorten(texts: Sequence[str]) -> list[str]:
    """Shorten long numbers and words, as far as different texts remain different."""
    for digits in (4, 6, 9):
        rounded = [_rounded(text, digits) for text in texts]
        if len(set(rounded)) == len(set(texts)):
            break
    else:
        rounded = list(texts)
    for cut in (slice(MAX_LETTERS), slice(-MAX_LETTERS, None)):
        cut_texts = [text if len(text) <= MAX_LETTERS + 1 else text[cut] for text in rounded]
        if len(set(cut_texts)) == len(set(texts)):
            keeps_start = cut.start is None
            return [
                cut_text if cut_text == text else f"{cut_text}…" if keeps_start else f"…{cut_text}"
                for cut_text, text in zip(cut_texts, rounded, strict=True)
            ]
    return rounded


def _rounded(text: str, digits: int) -> str:
    try:
        return f"{float(text):.{digits}g}" if "." in text and len(text) > digits + 3 else text
    except ValueError:
        return text


def to_csv(columns: Sequence[Column]) -> str:
    """The table as CSV, with plain numbers; a missing number is an empty field."""
    fields = [pair for column in columns for pair in (column.values or {column.title: column.texts}).items()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in fields])
    writer.writerows(zip(*(values for _, values in fields), strict=True))
    return out.getvalue()
