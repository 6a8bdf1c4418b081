"""Documents as Markdown tables, for TensorBoard's text page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def tables(document: Mapping[str, Any]) -> str:
    """Return one table of names and values, nested names as a.b; a list of mappings becomes a separate table."""
    pairs, row_tables = [], []
    for name, value in _flatten(document):
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            row_tables.append(f"**{name}**\n\n{_table_of_rows(value)}")
        else:
            pairs.append((name, value))
    first = [_table(("name", "value"), pairs)] if pairs else []
    return "\n\n".join(first + row_tables)


def _flatten(document: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _table_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return _table(columns, [[row.get(name) for name in columns] for row in rows])


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.replace("|", "\\|").split())
