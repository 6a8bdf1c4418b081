"""Files of a data folder that a run does not use: how many, and why."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

_JUNK = frozenset(("__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "thumbs.db"))
_MOST_REASONS = 8


def is_junk(name: str) -> bool:
    """Whether a file manager, a notebook or an archive has left this file or folder."""
    return name.startswith((".", "~$")) or name.lower() in _JUNK


def is_read_elsewhere(path: Path, part: Path | None = None) -> bool:
    """Whether this is a link to a folder around it, which has no end, or to a folder inside `part`."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return path.parent.resolve().is_relative_to(target) or (part is not None and target.is_relative_to(part.resolve()))


def note_unused(folder: Path, names: Iterable[str], unused: Counter[str], part: Path | None = None) -> None:
    """Count the files with these names, and those in the folders with these names, by reason."""
    for name in sorted(names):
        path, ending = folder / name, Path(name).suffix.lower()
        if is_junk(name):
            unused["hidden or of the system"] += _count_files(path)
        elif path.is_dir() and is_read_elsewhere(path, part):
            unused["linked twice"] += 1
        elif path.is_dir():
            unused[f"in {name}/"] += _count_files(path)
        else:
            unused[f"with the ending {ending}" if ending else "without an ending"] += 1


def _count_files(path: Path) -> int:
    return sum(len(files) for *_, files in os.walk(path)) if path.is_dir() else 1


def usage_line(folder: Path, train: str, test: str, *, used: int, unused: Mapping[str, int]) -> str:
    """Describe what is for training and for testing, and how many files are used, or not, by reason."""
    first, rest = list(unused.items())[:_MOST_REASONS], list(unused.values())[_MOST_REASONS:]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in (*first, ("more", sum(rest))) if count)
    return f"--data-dir {folder}: train is {train}, test is {test}; files used: {used:,}, not used: {reasons or 'none'}"
