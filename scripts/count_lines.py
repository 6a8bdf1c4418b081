"""Fails if product or tests have more lines than pyproject.toml allows; `make lint` runs it.

A commit that raises a limit says what the lines buy, and one that saves lines lowers it.
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1]
FOLDERS = {"product": ("hvdtrain", "launch"), "tests": ("tests",)}


def main() -> int:
    """Print both counts; return 1 if one is above its limit."""
    limits = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["lines"]
    is_above = False
    for name, folders in FOLDERS.items():
        files = [file for folder in folders for file in (PROJECT / folder).rglob("*.py")]
        count = sum(len(file.read_bytes().splitlines()) for file in files)
        is_above |= count > limits[name]
        print(f"{name}: {count:,} lines of {limits[name]:,}")
    if is_above:
        print("more lines than [tool.lines] of pyproject.toml allows: delete what they replace, or raise the limit")
    return 1 if is_above else 0


if __name__ == "__main__":
    sys.exit(main())
