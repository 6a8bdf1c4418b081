"""Figures of README and docs/: each names the result or the source that it is from, and has the same number.

    A step took 4.4 times<!-- from slow-link.json / powersgd:2 / 100 Mbit/s, 2 x 2 --> as long.

A mark names one of these, or several between semicolons:

- a file of bench/results, with a row by the text of its cells (`a + b` for two cells) and a column, unless all numbers
  of the file or of the row are meant
- another file of the project, which has the number
- in words, where the number is from

It covers the figures before it in its paragraph, item or row of a table, up to the mark before. On the line above, it
covers all figures of the paragraph, list or table that have no other mark.

A figure is a number with a unit of time, size or speed, a percentage, a ratio with its interval, or a table's cell with
two decimals. Code, output and generated parts have none; versions, ports and counts are none.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "bench" / "results"
MARK = re.compile(r"<!-- from (.+?) -->")
# Generated parts, code, and the targets of links.
SKIPPED = re.compile(
    r"<!-- ([\w-]+): \S+ -->\n.*?<!-- end of \1 -->|^```.*?^```|(?<=\n\n)(?: {4}[^\n]*\n)+|`[^`\n]*`|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = r"(?:%|points?\b|times\b|(?:[mnu]?s|min|h|seconds?|minutes?|hours?|[KMG]i?B|\w+/s)(?![\w/-]))"
FIGURE = re.compile(
    rf"(?<![\w.:/-])(?:{_NUMBER} \(-?{_NUMBER} to -?{_NUMBER}|{_NUMBER} ± {_NUMBER}"
    rf"|{_NUMBER}(?:(?: to | and | or |, ){_NUMBER})* ?{_UNIT}|(?<=\| )\d+\.\d\d+(?= \|))"
)
# In code 10 % may be 0.1, 2 minutes 120, 5 ms 0.005, and 1 GiB 1024.
FACTORS = {"%": 100, "min": 1 / 60, "minutes": 1 / 60, "ms": 1e3, "us": 1e6, "ns": 1e9, "GiB": 1 / 1024}
_LINK_SPEED = re.compile(r"[KMGkmg]bit/s$")  # the condition of a measurement
_IN_FILES = re.compile(r"(?<![\w.])\d+(?:[,_]\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w)")


def problems(pages: Iterable[Path]) -> Iterator[str]:
    """Yield a text for each figure without a mark, or with one that has another number."""
    for page in pages:
        for line, problem in of_page(page.read_text()):
            yield f"docs: {page.relative_to(PROJECT)}:{line}: {problem}"


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each paragraph, item or row with a wrong figure, and what is wrong with it."""
    above, unit, first = "", "", 0
    prose = SKIPPED.sub(lambda skipped: "\n" * skipped[0].count("\n") or "`", text)
    for number, line in enumerate([*prose.splitlines(), ""], start=1):
        begins = not line.strip() or re.match(r"\||- |\d+\. ", line) or MARK.fullmatch(line.strip())
        if begins:
            yield from ((first, problem) for problem in check(unit, above))
            unit = ""
        if not line.strip():
            above = ""
        elif mark := MARK.fullmatch(line.strip()):
            above = mark[1]
        else:
            unit, first = unit + line + "\n", first if unit else number


def check(unit: str, above: str = "") -> Iterator[str]:
    """Yield what is wrong with the figures of a paragraph, an item or a row, below this mark."""
    parts = MARK.split(unit)
    for text, mark in zip(parts[::2], [*parts[1::2], above], strict=True):
        figures = [found[0] for found in FIGURE.finditer(text) if not _LINK_SPEED.search(found[0])]
        if figures and not mark:
            yield f"{figures[0]}: without a source. Add <!-- from FILE.json / ROW / COLUMN --> after it."
            continue
        try:
            yield from (f"{figure}: not in {mark}" for figure in figures if not is_from(figure, mark))
        except ValueError as error:
            yield f"<!-- from {mark} -->: {error}"


def is_from(figure: str, mark: str) -> bool:
    """Return whether each number of a figure is one of its sources, rounded; ValueError for a missing source."""
    shown, factor = re.findall(_NUMBER, figure), FACTORS.get(figure.rsplit(maxsplit=1)[-1], 1)
    known = numbers(mark, only_first=len(shown) == 1)
    if known is None:
        return True
    for text in shown:
        number, rounding = float(text.replace(",", "")), 0.5 * 10 ** -len(text.partition(".")[2]) + 1e-9
        if not any(min(abs(one - number), abs(factor * one - number)) <= rounding for one in known):
            return False
    return True


def numbers(mark: str, *, only_first: bool) -> list[float] | None:
    """Return the numbers of the sources of a mark, None if one is in words; ValueError for one that does not exist.

    With `only_first` a cell has its first number alone, which is the median.
    """
    found: list[float] = []
    for source in mark.split("; "):
        name, *keys = source.split(" / ")
        if not re.fullmatch(r"[\w./-]+\.\w+", name):
            return None
        file = (PROJECT if "/" in name else RESULTS) / name
        if not file.exists():
            raise ValueError(f"no file {name}")
        text = file.read_text()
        if file.suffix == ".json":
            text = re.sub(r'"(?:n|commit)": [^,}]+', "", json.dumps(_part(json.loads(text), keys)))
        of_source = [float(re.sub("[,_]", "", number)) for number in _IN_FILES.findall(text)]
        found += of_source[:1] if only_first and keys[1:] else of_source
    return found


def _part(document: Any, keys: list[str]) -> Any:
    """Return a result, the cells of one of its rows, or the cell of a row in a column."""
    if not keys:
        return document
    row = _only(document["rows"], lambda row: list(map(str, row.values())), keys[0].split(" + "))
    return row[_only(list(row), lambda name: [name], keys[1:])] if keys[1:] else list(row.values())


def _only(choices: list[Any], texts: Callable[[Any], list[str]], words: list[str]) -> Any:
    """Return the one choice of which each word is a text, or else part of a text."""
    equal = [one for one in choices if set(words) <= set(texts(one))]
    similar = [one for one in choices if all(any(word in text for text in texts(one)) for word in words)]
    for found in (equal, similar):
        if len(found) == 1:
            return found[0]
    raise ValueError(f"{' + '.join(words)} matches {len(similar)} rows or columns, not 1")
