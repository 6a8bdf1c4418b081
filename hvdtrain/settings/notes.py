"""Notes at the fields of settings, in their `Annotated`: rules for values, and what else is made of a field."""

import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value must be, whatever the data and the machine."""

    holds: Callable[[Any], bool]
    text: str  # what follows the option and its value in the message


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
    """The rule that a value is one of these names."""
    return Rule(holds=lambda value: value in names, text=f"unknown. Choose one of {', '.join(names)}")


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What an option means that stands without its value."""

    means: str


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The field is no option: the program chooses its value, unless a program of one's own sets another default."""

    why: str  # it needs no option, for who gives one


class Mark(Enum):
    """What a field is, besides an option."""

    SHAPES = "says what the tensors of a checkpoint mean: with another value the checkpoint is of no use"
    ASIDE = "says where a run is kept and what is watched, not what the run computes"


SHAPES, ASIDE = Mark.SHAPES, Mark.ASIDE


@dataclass(frozen=True, kw_only=True)
class Column:
    """A person compares runs by this field."""

    value: str = ""  # the name of what was derived from the field and is shown in its place
    first: bool = False  # TensorBoard shows the column from the beginning


COLUMN = Column()


def notes(settings: type) -> dict[str, list[Any]]:
    """The notes at each field of a dataclass; those of its bases stay if a class declares a field again."""
    by_field: dict[str, list[Any]] = {}
    for kind in reversed(settings.__mro__):
        for name, hint in inspect.get_annotations(kind, eval_str=True).items():
            by_field.setdefault(name, []).extend(getattr(hint, "__metadata__", ()))
    return by_field


def chosen(settings: type) -> dict[str, str]:
    """The fields of a dataclass that are no options, and why."""
    return {
        name: note.why for name, at_field in notes(settings).items() for note in at_field if isinstance(note, Chosen)
    }


def marked(settings: type, mark: Mark) -> tuple[str, ...]:
    """The fields of a dataclass with this mark."""
    return tuple(name for name, at_field in notes(settings).items() if mark in at_field)


def columns(settings: type) -> tuple[str, ...]:
    """What a person compares runs by; what TensorBoard shows from the beginning stands first."""
    of_fields = [
        (note.value or name, note.first)
        for name, at_field in notes(settings).items()
        for note in at_field
        if isinstance(note, Column)
    ]
    return tuple(name for name, _ in sorted(of_fields, key=lambda column: not column[1]))
