"""Annotations of settings fields: rules for values, and other uses of a field."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition on a value, independent of data and machine."""

    holds: Callable[[Any], bool]
    text: str  # follows the option and its value in the message


AT_LEAST_1 = Rule(holds=lambda value: value >= 1, text="must be at least 1")
AT_LEAST_0 = Rule(holds=lambda value: 0 <= value < math.inf, text="must be a number of at least 0")
POSITIVE = Rule(
    holds=lambda value: 0 < value < math.inf, text="must be a number greater than 0. Leave it out for the default"
)
PROBABILITY = Rule(holds=lambda value: 0 <= value < 1, text="must be at least 0 and less than 1")
SEED = Rule(holds=lambda value: 0 <= value < 2**32, text="must be at least 0 and less than 2**32")
FOLDER_NAME = Rule(
    holds=lambda name: name not in ("", ".", "..") and "/" not in name and name.isprintable(),
    text="must be one folder's name. Put its parents into --runs-dir",
)


def one_of(names: Collection[str]) -> Rule:
    """Return the rule that a value must be one of these names."""
    return Rule(holds=lambda value: value in names, text=f"unknown. Choose one of {', '.join(names)}")


def matching(pattern: str, text: str) -> Rule:
    """Return the rule that a value must match a regular expression as a whole."""
    return Rule(holds=lambda value: re.fullmatch(pattern, value, re.ASCII) is not None, text=text)


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The value of an option that is given without one."""

    means: str


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Marks a field that is not an option: the program chooses its value, unless your program sets another default."""

    why: str  # why no option is needed, for a user who tries it
    unless_declared: bool = False  # an option of each program that declares the field again


class Mark(Enum):
    """Other properties of a field."""

    SHAPES = "says what the tensors of a checkpoint mean: with another value the checkpoint is of no use"
    NEUTRAL = "says where a run is kept and what is watched, not what the run computes"


SHAPES, NEUTRAL = Mark.SHAPES, Mark.NEUTRAL


@dataclass(frozen=True, kw_only=True)
class Column:
    """Marks a field by which users compare runs."""

    value: str = ""  # name of the derived value that is shown instead
    first: bool = False  # TensorBoard shows the column by default


COLUMN = Column()


def notes(settings: type) -> dict[str, list[Any]]:
    """Return the annotations of each field of a dataclass, including those of a base whose field is redeclared."""
    by_field: dict[str, list[Any]] = {}
    for kind in reversed(settings.__mro__):
        for name, hint in inspect.get_annotations(kind, eval_str=True).items():
            by_field.setdefault(name, []).extend(getattr(hint, "__metadata__", ()))
    return by_field


def auto_fields(settings: type) -> dict[str, str]:
    """Return the fields of a dataclass that are not options, with the reason."""
    declared = Counter(name for kind in settings.__mro__ for name in inspect.get_annotations(kind))
    return {
        name: note.why
        for name, at_field in notes(settings).items()
        for note in at_field
        if isinstance(note, Auto) and not (note.unless_declared and declared[name] > 1)
    }


def marked(settings: type, mark: Mark) -> tuple[str, ...]:
    """Return the fields of a dataclass with this mark."""
    return tuple(name for name, at_field in notes(settings).items() if mark in at_field)


def columns(settings: type) -> tuple[str, ...]:
    """Return the columns for comparing runs; those that TensorBoard shows by default come first."""
    of_fields = [
        (note.value or name, note.first)
        for name, at_field in notes(settings).items()
        for note in at_field
        if isinstance(note, Column)
    ]
    return tuple(name for name, _ in sorted(of_fields, key=lambda column: not column[1]))
