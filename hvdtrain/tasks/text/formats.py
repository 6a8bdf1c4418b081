"""Rows of text from files: JSON lines, CSV and TSV, GLUE's tables, plain text. Messages name file and line."""

import codecs
import csv
import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from hvdtrain.settings.safety.exits import BadInput

# The columns that identify GLUE's tables by their header: text, pair, label.
_GLUE = (
    ("question", "sentence", "label"),  # before SST-2, which has a sentence and a label too
    ("sentence", None, "label"),
    ("#1 String", "#2 String", "Quality"),
    ("sentence1", "sentence2", "label"),
    ("sentence1", "sentence2", "gold_label"),
    ("question1", "question2", "is_duplicate"),
)
_LONGEST = 1 << 20  # characters of a document: the tokenizer needs many bytes for each
_SEPARATORS = ",;\t|"
_MISSING = ("", "nan", "NaN", "<NA>", "None", "null", "NULL")  # labels as pandas, Python, JSON and SQL write none
_NO_AGREEMENT = ("gold_label", "-")  # SNLI's column and its value for texts on whose label the annotators disagree
_MARKS = {  # of encodings; UTF-32's begins with UTF-16's
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


_PACKED = {
    b"PK\3\4": "a zip or Excel file",
    b"\x1f\x8b": "a gzip file",
    b"PAR1": "a Parquet file",
    b"\xd0\xcf\x11\xe0": "an Excel file",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text, or a pair of texts; without a label it is left out where labels are learned."""

    text: str
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns; None for a missing column, or for `text` if the header determines all columns."""

    text: str | None
    pair: str | None
    label: str | None
    require_label: bool = True  # False: a row, or a whole file, may lack its label

    @property
    def needed(self) -> dict[str, str]:
        """The columns that a file must have, by their place in --columns."""
        names = {"TEXT": self.text, "PAIR": self.pair, "LABEL": self.label if self.require_label else None}
        return {place: name for place, name in names.items() if name is not None}

    def require(self, location: str, header: Sequence[str]) -> None:
        """Raise BadInput for a column that is not in the header."""
        for place, name in self.needed.items():
            if name not in header:
                found = ", ".join(map(repr, header))
                raise BadInput(f"--columns: no {place} column {name!r} in {location}. Choose from {found}.")


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
    """Yield a row for each line of a table with a header; blank lines are skipped.

    GLUE's tables are not `quoted`: a quotation mark is an ordinary character, and tabs separate columns. Without the
    name of a text column the header must be one of GLUE's, with a column of labels if rows must be `labelled`.
    """
    csv.field_size_limit(sys.maxsize)  # documents are longer than csv's 128 KiB
    lines = (line for _, line in _read_lines(path))
    head: list[str] = []
    while not "".join(head).strip() and (line := next(lines, "")):
        head.append(line)
    separator = _choose_separator(path, "".join(head).strip("\r\n"), columns if quoted else None)
    rows = csv.reader(
        chain(head, lines),
        delimiter=separator,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        header = [name.strip() for name in next((cells for cells in rows if cells), [])]
        is_glue = columns.text is None
        if is_glue and header:
            columns = _match_glue_header(path, header, columns, labelled=labelled)
        columns.require(str(path), header)
        if repeated := [name for name in columns.needed.values() if header.count(name) > 1]:
            raise BadInput(f"{path}: two columns are called {repeated[0]!r}. Rename one of them.")
        named_width = max((place for place, name in enumerate(header, start=1) if name), default=0)
        for cells in rows:
            if not any(cells):
                continue
            location = f"{path}:{rows.line_num}"
            if len(header) > 1 and [cell.strip() for cell in cells] == header:
                raise BadInput(f"{location}: the header again. Remove the line.")
            if separator == "\t" and any(_has_rows(cell, place, len(header)) for place, cell in enumerate(cells)):
                raise BadInput(
                    f"{location}: a quotation mark in this row or above has no partner. Write it twice, or pass --data "
                    "glue with --columns, which reads it as text."
                )
            if is_glue and len(cells) < named_width:  # QQP has such rows
                yield Row(text=" ".join(cells))
                continue
            if not quoted and header[-1] == _NO_AGREEMENT[0]:
                del cells[len(header) - 1 : -1]  # SNLI has up to four more labels before it
            if len(cells) < named_width or any(cells[len(header) :]):
                raise BadInput(
                    f"{location}: {len(cells)} cells, but the header has {len(header)}. Check its quotes and "
                    "separators."
                )
            yield _make_row(location, dict(zip(header, cells, strict=False)), columns)
    except csv.Error as error:
        raise BadInput(f"{path}:{rows.line_num}: {error}. Correct the line.") from error


def _has_rows(cell: str, place: int, width: int) -> bool:
    """Return whether a cell in quotation marks has the rest of a row, whole rows, and the start of another."""
    if "\t" not in cell:
        return False
    first, *rows = [line.count("\t") for line in re.split("\r\n?|\n", cell)]
    ends = (first, rows.pop() if rows else 0)
    return width > 1 and set(rows) == {width - 1} and ends == (width - 1 - place, place)


def _choose_separator(path: Path, header: str, columns: Columns | None) -> str:
    """Return the separator with which the header has these columns; by default tabs in .tsv and .txt, else commas."""
    default = "\t" if path.suffix.lower() in (".tsv", ".txt") else ","
    if columns is None:
        return default
    separator: str
    for separator in (default, *_SEPARATORS):
        names = {name.strip() for name in next(csv.reader([header], delimiter=separator), [])}
        if names.issuperset(columns.needed.values()):
            return separator
    return default


def read_documents(path: Path) -> Iterator[Row]:
    """Yield a row for each block of lines between blank lines; a row has up to twice _LONGEST characters."""
    block: list[str] = []
    size = 0
    for piece in (line[at : at + _LONGEST] for _, line in _read_lines(path) for at in range(0, len(line), _LONGEST)):
        if text := piece.strip():
            block.append(text)
            size += len(text)
        if block and (not text or size >= _LONGEST):
            yield Row(text=" ".join(block))
            block, size = [], 0
    if block:
        yield Row(text=" ".join(block))


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line: UTF-8, or UTF-16 or UTF-32 with a mark, with any system's line ends."""
    number = 0
    try:
        with path.open("rb") as file:
            encoding = _detect_encoding(path, file.read(4))
        with path.open(encoding=encoding, newline="") as text:
            for number, line in enumerate(text, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        number += 1 + len(re.findall("\r\n?|\n", error.object[: error.start].decode(error.encoding, "replace")))
        byte = error.object[error.start]
        if not encoding.startswith("utf-8"):
            raise BadInput(
                f"{path}:{number}: not valid {encoding.upper()} (byte 0x{byte:02x}). Save the file again, as UTF-8."
            ) from error
        raise BadInput(
            f"{path}:{number}: not valid UTF-8 (byte 0x{byte:02x}). Convert the file: iconv -f ENCODING "
            "-t utf-8, for example cp1252 or gbk"
        ) from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error


def _detect_encoding(path: Path, start: bytes) -> str:
    """Return the encoding of a file by its first four bytes."""
    if mark := next((mark for mark in _MARKS if start.startswith(mark)), None):
        return _MARKS[mark]
    if kind := next((_PACKED[magic] for magic in _PACKED if start.startswith(magic)), None):
        raise BadInput(f"{path}: {kind}, not text. Unpack it, or save it as a table in UTF-8.")
    if b"\0" in start:
        raise BadInput(
            f"{path}: UTF-16 or UTF-32 without a byte-order mark. Convert the file: iconv -f utf-16le -t utf-8"
        )
    return "utf-8"


def _match_glue_header(path: Path, header: Sequence[str], columns: Columns, *, labelled: bool) -> Columns:
    for with_label in (True, False) if labelled and not columns.require_label else (labelled,):
        for text, pair, label in _GLUE:
            label_name = label if with_label else None
            if {text, pair, label_name} - {None} <= set(header):
                return replace(columns, text=text, pair=pair, label=label_name)
    if "score" in header:
        raise BadInput(
            f"{path}: a score (STS-B) is a regression target, not a label. Make classes of it, and pass --columns "
            "sentence1,sentence2,CLASS."
        )
    raise BadInput(
        f"{path}: the header {', '.join(map(repr, header))} is not one of GLUE's. Pass --columns TEXT,LABEL, "
        "or TEXT,PAIR,LABEL for pairs; add a header to a file without one, such as CoLA's."
    )


def _make_row(location: str, values: Mapping[str, Any], columns: Columns) -> Row:
    """Return the row's columns; a label may be a number or a truth value in JSON."""
    text = _column_text(location, values, columns.text)
    assert text is not None
    value = None if columns.label is None else values.get(columns.label)
    shown = unicodedata.normalize("NFC", str(value).strip())  # a Mac writes accents as letters of their own
    label = None if isinstance(value, list | dict) or shown in _MISSING else shown
    if columns.label is not None and label is None and isinstance(value, list | dict) and value:
        raise BadInput(f"{location}: column {columns.label!r} has several labels. Each text has one: choose it.")
    if columns.label is not None and label is None and columns.require_label:
        raise BadInput(f"{location}: no label in column {columns.label!r}. Add one, or remove the row.")
    if (columns.label, label) == _NO_AGREEMENT:
        label = None
    return Row(text=text, pair=_column_text(location, values, columns.pair), label=label)


def _column_text(location: str, values: Mapping[str, Any], column: str | None) -> str | None:
    if column is None:
        return None
    if isinstance(values[column], list) and values[column]:
        raise BadInput(f"{location}: column {column!r} has a list, not a text. Join its parts.")
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
