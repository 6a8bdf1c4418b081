"""docs/explanation/benchmarks.md: bench/results/page.md, in which a line `{{NAME}}` is the table of NAME.json.

Other pages have the table between `<!-- NAME: bench/results -->` and `<!-- end of NAME -->`.

A file is what a case of bench/run.py writes, or has the same rows and also the command, the commit and the machine.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from scripts.docs import markdown

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "bench" / "results"
TABLE = re.compile(r"^\{\{([\w-]+)\}\}$", re.MULTILINE)
PART = re.compile(r"(<!-- ([\w-]+): bench/results -->\n).*?(<!-- end of \2 -->\n)", re.DOTALL)
ELSEWHERE = tuple(
    PROJECT / name
    for name in (
        "README.md",
        "docs/explanation/accuracy.md",
        "docs/explanation/comparison.md",
        "docs/explanation/predictions.md",
        "docs/how-to/speed-up-trainer.md",
        "docs/reference/peers.md",
    )
)
USUAL_MACHINE, USUAL_TORCH = "2 cores of AMD EPYC", "2.11.0"  # which the page names once
DIGITS = 4  # at most, of a number that is shown as it is; a longer one is rounded to three


def render() -> str:
    """The page; every result must have its place in it."""
    text = (RESULTS / "page.md").read_text()
    shown = {*TABLE.findall(text), *(part[2] for page in ELSEWHERE for part in PART.finditer(page.read_text()))}
    left_out = {file.stem for file in RESULTS.glob("*.json")} - shown
    if left_out:
        raise ValueError(f"bench/results/page.md: no line for {', '.join(sorted(left_out))}")
    return TABLE.sub(lambda name: table((RESULTS / f"{name[1]}.json").read_text()), text)


def filled(page: Path) -> str:
    """Return a page with the tables of its results."""

    def with_table(part: re.Match[str]) -> str:
        return f"{part[1]}{table((RESULTS / f'{part[2]}.json').read_text())}\n{part[3]}"

    return PART.sub(with_table, page.read_text())


def table(document: str) -> str:
    """Question, source and rows of a result, in Markdown; its numbers keep the digits that the file has."""
    result = json.loads(document, parse_float=Decimal)
    rows = result["rows"]
    usual_n = result.get("n", _usual_n(rows))
    cells = [[_shown(cell, usual_n) for cell in row.values()] for row in rows]
    numeric = [name for name in rows[0] if all(_is_number(row[name]) for row in rows)]
    about = ", ".join(_about(result, usual_n))
    question = f"{result['question'].rstrip(':.')}{f' ({about})' if about else ''}:"
    return "\n".join([question, "", *markdown.table(list(rows[0]), cells, numeric=numeric)]).rstrip()


def _usual_n(rows: list[dict[str, Any]]) -> int | None:
    """The n of most ratios, if all of them have one."""
    found = [cell.get("n") for row in rows for cell in row.values() if isinstance(cell, Mapping)]
    return Counter(found).most_common(1)[0][0] if found and None not in found else None


def _about(result: Mapping[str, Any], usual_n: int | None) -> Iterator[str]:
    """How it was measured."""
    machine, torch = result.get("machine", USUAL_MACHINE), USUAL_TORCH
    if isinstance(machine, Mapping):
        machine, torch = machine["CPU"], machine["torch"].partition("+")[0]
    if machine != USUAL_MACHINE:
        yield machine
    if torch != USUAL_TORCH:
        yield f"torch {torch}"
    yield from (f"{name} {value}" for name, value in result.get("about", {}).items())
    if "load" in result:
        yield result["load"]
    if usual_n is not None:
        yield f"n = {usual_n}"
    if "command" in result:
        yield f"`{result['command']}`"
    if "commit" in result:
        yield result["commit"]


def _is_number(cell: Any) -> bool:
    return cell is None or isinstance(cell, int | Decimal)


def _shown(cell: Any, usual_n: int | None) -> str:
    """A cell; a ratio with its interval, and with its n if that is not the usual one."""
    match cell:
        case int() | Decimal():
            return _number(cell)
        case list():
            return ", ".join(_shown(one, usual_n) for one in cell)
        case Mapping():
            details = [f"{_number(cell['low'])} to {_number(cell['high'])}"]
            details += [f"n = {cell['n']}"] if cell.get("n") not in (None, usual_n) else []
            details += [cell["commit"]] if "commit" in cell else []
            return f"{_number(cell['median'])} ({', '.join(details)})"
        case _:
            return "" if cell is None else str(cell)


def _number(value: int | Decimal) -> str:
    """With the digits that the file has, unless these are more than anybody would write."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or len(value.as_tuple().digits) <= DIGITS:
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
