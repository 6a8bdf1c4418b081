"""The benchmarks: each case answers one question, and writes a table to build/bench/ as JSON and Markdown.

    python bench/run.py                     lists the cases
    python bench/run.py step --rounds 3     runs one of them; --help shows its options

A case is an entry in CASES of a file in bench/cases/; to add one, add a file.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.pairs import Case

HERE = Path(__file__).parent.resolve()


def cases() -> dict[str, Case]:
    """Return the cases of all files, by name."""
    modules = [import_module(f"bench.cases.{file.stem}") for file in sorted((HERE / "cases").glob("*.py"))]
    return {name: case for module in modules for name, case in module.CASES.items()}


def add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    """Add an option of the default's type, several values if it is a list; for (default, choices) one of these."""
    default, choices = default if isinstance(default, tuple) else (default, None)
    if isinstance(default, bool):
        parser.add_argument(name, action="store_true")
        return
    several = isinstance(default, list)
    kind = type((default or [""])[0]) if several else type(default)
    nargs = "+" if several else None
    parser.add_argument(name, nargs=nargs, type=kind, choices=choices, default=default, help="default: %(default)s")


def main() -> int:
    sys.path.insert(0, str(HERE.parent))  # the files of bench/ import each other as bench.NAME
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parsers = parser.add_subparsers(title="cases", metavar="CASE", dest="case")
    found = cases()
    for name, case in found.items():
        text = str(case.measure.__doc__)
        own = parsers.add_parser(
            name, help=text.splitlines()[0].replace("%", "%%"), description=text, formatter_class=raw
        )
        for option, default in case.options.items():
            add_option(own, f"--{option}", default)
    chosen = parser.parse_args()
    if chosen.case is None:
        parser.print_help()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # everything that a case has started ends with it
    table = found[chosen.case].measure(chosen)
    table.write()
    print(f"\n{table.markdown()}")
    return 0 if table.holds else 1


if __name__ == "__main__":
    sys.exit(main())
