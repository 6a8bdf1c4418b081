"""A table for people and the same for programs."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdtrain.compare.runs import MISSING
from hvdtrain.compare.spread import Mean

Value = str | float | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str  # with its unit
    texts: Sequence[str]  # one for each row
    values: dict[str, Sequence[Value]] = field(default_factory=dict)  # columns of the CSV; none: title and texts
    right: bool = False  # numbers stand at the right
    setting: bool = False  # what differs, not what came out


def measured(title: str, name: str, means: Sequence[Mean | None], form: Callable[[float], str]) -> Column:
    """Mean +- deviation; in the CSV `name` and `name_deviation`."""
    texts = [MISSING if one is None else form(one.mean) + _spread(one, form) for one in means]
    values: dict[str, Sequence[Value]] = {
        name: [None if one is None else one.mean for one in means],
        f"{name}_deviation": [None if one is None else one.deviation for one in means],
    }
    return Column(title=title, texts=texts, values=values, right=True)


def _spread(one: Mean, form: Callable[[float], str]) -> str:
    """The deviation with as many decimals as the mean; not of a count that is always the same."""
    if one.deviation is None or (form is whole and not one.deviation):
        return ""
    return f" ± {one.deviation:.{len(form(one.mean).partition('.')[2].rstrip(' %'))}f}"


def three_digits(value: float) -> str:
    """At least three significant digits, and never fewer than the number has before its point."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(4, max(0, 2 - size))}f}"


def whole(value: float) -> str:
    """Of counts: without decimals where it has none."""
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def markdown(columns: Sequence[Column]) -> str:
    """Padded, so that it can be read as it stands."""
    wide = [max(3, len(one.title), *map(len, map(_cell, one.texts))) for one in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if one.right else cell.ljust(width)
            for cell, width, one in zip(cells, wide, columns, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}{':' if one.right else '-'}" for width, one in zip(wide, columns, strict=True)]
    rows = zip(*([_cell(text) for text in one.texts] for one in columns), strict=True)
    return "\n".join([line([one.title for one in columns]), line(rule), *map(line, rows)]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def as_csv(columns: Sequence[Column]) -> str:
    """Plain numbers; a number that is not there is an empty field."""
    fields = [pair for one in columns for pair in (one.values or {one.title: one.texts}).items()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _ in fields])
    writer.writerows(zip(*(values for _, values in fields), strict=True))
    return out.getvalue()
