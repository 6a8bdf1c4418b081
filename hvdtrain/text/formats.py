"""Rows of text from files: JSON lines, CSV and TSV, GLUE's tables, plain text. Messages name file and line."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.safety.exits import BadInput

# The columns that identify GLUE's tables by their header: text, pair, label.
_GLUE = (
    ("question", "sentence", "label"),  # before SST-2, which has a sentence and a label too
    ("sentence", None, "label"),
    ("#1 String", "#2 String", "Quality"),
    ("sentence1", "sentence2", "label"),
    ("sentence1", "sentence2", "gold_label"),
    ("question1", "question2", "is_duplicate"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text, or a pair of texts."""

    text: str
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns; None for a missing column, or for `text` if the header determines all columns."""

    text: str | None
    pair: str | None
    label: str | None

    def require(self, location: str, header: Sequence[str]) -> None:
        """Raise BadInput for a column that is not in the header."""
        for option, name in (
            ("--text-column", self.text),
            ("--pair-column", self.pair),
            ("--label-column", self.label),
        ):
            if name is not None and name not in header:
                raise BadInput(
                    f"{option} {name!r}: no such column in {location}. Choose from {', '.join(map(repr, header))}."
                )


def read_json_lines(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield a row for each line, which is a JSON object; blank lines are skipped."""
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}:{number}: not valid JSON ({error}). Write one object per line.") from error
        except RecursionError as error:
            raise BadInput(f"{path}:{number}: nested too deeply. Write one object of texts per line.") from error
        if not isinstance(values, dict):
            raise BadInput(f'{path}:{number}: not a JSON object. Write one per line, such as {{"text": ...}}.')
        columns.require(f"{path}:{number}", list(values))
        yield _make_row(f"{path}:{number}", values, columns)


def read_table(path: Path, columns: Columns, *, quoted: bool = True, labelled: bool = True) -> Iterator[Row]:
    """Yield a row for each line of a table with a header; tabs separate columns in .tsv and .txt, commas in others.

    GLUE's tables are not `quoted`: a quotation mark is an ordinary character. Without the name of a text column the
    header must be one of GLUE's, with a column of labels if rows must be `labelled`.
    """
    csv.field_size_limit(sys.maxsize)  # documents are longer than csv's 128 KiB
    lines = (line for _, line in _read_lines(path))
    rows = csv.reader(
        lines,
        delimiter="\t" if path.suffix.lower() in (".tsv", ".txt") else ",",
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        header = next(rows, [])
        if columns.text is None and header:
            columns = _match_glue_header(path, header, columns, labelled=labelled)
        columns.require(str(path), header)
        if repeated := [name for name in header if header.count(name) > 1]:
            raise BadInput(f"{path}: two columns are called {repeated[0]!r}. Rename one of them.")
        for cells in rows:
            if not cells:
                continue
            location = f"{path}:{rows.line_num}"
            if len(cells) != len(header):
                raise BadInput(
                    f"{location}: {len(cells)} cells, but the header has {len(header)}. Check its quotes and "
                    "separators."
                )
            yield _make_row(location, dict(zip(header, cells, strict=True)), columns)
    except csv.Error as error:
        raise BadInput(f"{path}:{rows.line_num}: {error}. Correct the line.") from error


def read_documents(path: Path) -> Iterator[Row]:
    """Yield a row for each block of lines between blank lines."""
    block: list[str] = []
    for _, line in _read_lines(path):
        if line.strip():
            block.append(line.strip())
        elif block:
            yield Row(text=" ".join(block))
            block = []
    if block:
        yield Row(text=" ".join(block))


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, in UTF-8 with or without a byte-order mark."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadInput(
            f"{path}:{number}: not valid UTF-8 (byte 0x{byte:02x}). Convert the file: iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error


def _match_glue_header(path: Path, header: Sequence[str], columns: Columns, *, labelled: bool) -> Columns:
    for text, pair, label in _GLUE:
        label_name = columns.label or label if labelled else None
        if {text, pair, None if columns.label else label_name} - {None} <= set(header):
            return Columns(text=text, pair=pair, label=label_name)
    if "score" in header:
        raise BadInput(
            f"{path}: a score (STS-B) is a regression target, not a label. Make classes of it, and name their "
            "--label-column."
        )
    raise BadInput(
        f"{path}: the header {', '.join(map(repr, header))} is not one of GLUE's. Pass --text-column and "
        "--label-column, and --pair-column for pairs; add a header to a file without one, such as CoLA's."
    )


def _make_row(location: str, values: Mapping[str, Any], columns: Columns) -> Row:
    """Return the row's columns; a label may be a number in JSON."""
    text = _column_text(location, values, columns.text)
    assert text is not None
    label = None if columns.label is None else values[columns.label]
    if columns.label is not None and (label is None or label == "" or isinstance(label, list | dict)):
        raise BadInput(f"{location}: no label in column {columns.label!r}. Add one, or remove the row.")
    return Row(
        text=text, pair=_column_text(location, values, columns.pair), label=None if label is None else str(label)
    )


def _column_text(location: str, values: Mapping[str, Any], column: str | None) -> str | None:
    if column is None:
        return None
    if not isinstance(values[column], str):
        raise BadInput(f"{location}: no text in column {column!r}. Add one, or remove the row.")
    text = str(values[column])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{location}: half a character ({text[error.start]!a}) in column {column!r}. Correct the text."
        ) from error
    return text
