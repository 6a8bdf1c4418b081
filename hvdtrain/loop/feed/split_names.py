"""Splits of a data folder by names as people write them, and its files that are unused."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.settings.safety.exits import BadInput

Role = Literal["train", "test", "validation"]

_WORDS: Mapping[Role, tuple[str, ...]] = {
    "train": ("train", "training", "trainval", "trn"),
    "test": ("test", "testing", "tst", "holdout", "heldout"),
    "validation": ("val", "valid", "validation", "dev", "devel", "development", "eval", "evaluation"),
}
# Words that say nothing about which split it is; MNLI's matched part is its test.
_FILLERS = ("set", "split", "data", "dataset", "folder", "images", "image", "imgs", "img", "pictures", "matched")
_ROLES: Mapping[str, Role] = {
    word + filler: role for role, words in _WORDS.items() for word in words for filler in ("", *_FILLERS)
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")  # of snake_case, kebab-case and CamelCase
_PART = re.compile(r"[-_]\d{5}[-_]of[-_](\d{5})$")  # as the Hugging Face hub writes them
_SHARD = re.compile(r"[-_.]?\d+[-_]of[-_]\d+$")  # one of several files of a split, as the Hugging Face hub has them
_JUNK = frozenset(("__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "thumbs.db"))
_MOST_NAMED, _MOST_REASONS = 3, 8


@dataclass(frozen=True, kw_only=True)
class SplitName:
    """A name that contains a split's word, such as seg_train: its role, and its other words."""

    role: Role
    others: tuple[str, ...]


def split_name(name: str) -> SplitName | None:
    """Return what a name says; None if it has no split's word, or those of several splits."""
    words = _words(name)
    roles = {_ROLES[word] for word in words if word in _ROLES}
    if len(roles) != 1:
        return None
    return SplitName(role=roles.pop(), others=tuple(word for word in words if word not in (*_ROLES, *_FILLERS)))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(_SHARD.sub("", name))]


def ends_with_split(name: str) -> bool:
    """Whether a split's word is the last one of a name: Corona_NLP_train, train2, and not test_tube."""
    words = [word for word in _words(name) if word not in _FILLERS and not word.isdigit()]
    return bool(words) and words[-1] in _ROLES


def splits_among(names: Iterable[str], is_split: Callable[[str], bool]) -> list[str]:
    """Return the names that stand for a split: test and test1, pairs such as seg_train and seg_test, and if `is_split`.

    A single name with other words may be anything, such as bullet_train or test_tube.
    """
    known = {name: split for name in names if (split := split_name(name))}
    roles: dict[tuple[str, ...], set[Role]] = {}
    for split in known.values():
        roles.setdefault(split.others, set()).add(split.role)
    return sorted(
        name
        for name, split in known.items()
        if all(word.isdigit() for word in split.others) or len(roles[split.others]) > 1 or is_split(name)
    )


def choose_splits(
    names: Sequence[str],
    others: Sequence[str],
    folder: Path,
    kind: str,
    *,
    prefer: Sequence[Role] = ("test", "validation"),
) -> tuple[list[str], list[list[str]]]:
    """Return the names for training, and those for each test, which may turn out to have no labels, by `prefer`.

    Raises BadInput with both readings if the names of splits, next to `others` that are none, can be read in two ways.
    `kind` is what has the names in `folder`.
    """
    groups: dict[Role, dict[tuple[str, ...], list[str]]] = {role: {} for role in _WORDS}
    for name in names:
        if split := split_name(name):
            groups[split.role].setdefault(split.others, []).append(name)
    if not groups["train"]:
        raise ambiguous(
            folder,
            f"{quoted(names)} for testing, while no {kind} is called train",
            f"{quoted(names)} as a {kind}{f' like {quoted(others)}' if others else ' of any name'}",
            f"Call the {kind} for training train, or rename what is no split, for example to {names[0]}_other",
        )
    train = _only(groups["train"], kind)
    if train is None:
        raise _two_of_a_kind(groups["train"], folder)
    _require_parts(train)
    pair = split_name(train[0])
    tests: list[list[str]] = []
    for role in prefer:
        candidates = groups[role]
        if pair is not None and pair.others in candidates:
            candidates = {pair.others: candidates[pair.others]}
        test = _only(candidates, kind)
        if candidates and test is None and not tests:  # a spare split need not be clear
            raise _two_of_a_kind(candidates, folder)
        if test is not None:
            if not tests:
                _require_parts(test)
            tests.append(test)
    return train, tests


def ambiguous(folder: Path, first: str, second: str, remedy: str) -> BadInput:
    """Return the error for names that have two readings."""
    return BadInput(f"--data-dir {folder}: ambiguous names: either {first}, or {second}. {remedy}.")


def _only(candidates: Mapping[tuple[str, ...], list[str]], kind: str) -> list[str] | None:
    """Return the single candidate, or the files that a split is cut into; None if there are others."""
    names = [name for group in candidates.values() for name in group]
    are_shards = kind == "file" and len(candidates) == 1 and all(_SHARD.search(name) for name in names)
    return names if len(names) == 1 or are_shards else None


def _require_parts(names: Sequence[str]) -> None:
    """Raise BadInput for files of a split, such as train-00000-of-00002, of which others are missing."""
    counts = {int(match[1]) for name in names if (match := _PART.search(name))}
    if counts and counts != {len(names)}:
        raise BadInput(f"{quoted(names)}: {len(names)} of {max(counts)} files. Add the others, or rename these.")


def _two_of_a_kind(candidates: Mapping[tuple[str, ...], list[str]], folder: Path) -> BadInput:
    first, *rest = [name for group in candidates.values() for name in group]
    return ambiguous(folder, f"{first!r} is the split", f"{quoted(rest)} is", "Merge them, or move away all but one")


def quoted(names: Sequence[str]) -> str:
    """Return at most three names for a message."""
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def is_junk(name: str) -> bool:
    """Whether a file manager, a notebook or an archive has left this file or folder."""
    return name.startswith((".", "~$")) or name.lower() in _JUNK


def is_read_elsewhere(path: Path, part: Path | None = None) -> bool:
    """Whether this is a link to a folder around it, which has no end, or to a folder inside `part`."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return path.parent.resolve().is_relative_to(target) or (part is not None and target.is_relative_to(part.resolve()))


def require_target(path: Path, suffixes: Sequence[str] = ("",)) -> None:
    """Raise BadInput for a link to nothing that has the name of a split: without it the test would be another."""
    is_split = path.suffix.lower() in suffixes and split_name(path.stem) is not None
    if is_split and path.is_symlink() and not path.exists():
        raise BadInput(f"{path}: a link to nothing, by its name a split. Mount or fetch what it names.")


def note_unused(folder: Path, names: Iterable[str], unused: Counter[str], part: Path | None = None) -> None:
    """Count the files with these names, and those in the folders with these names, by reason."""
    for name in sorted(names):
        path, ending = folder / name, Path(name).suffix.lower()
        if is_junk(name):
            unused["hidden or of the system"] += _count_files(path)
        elif path.is_symlink() and not path.exists():
            unused["linked to nothing"] += 1
            require_target(path)
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
