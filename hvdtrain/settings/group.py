"""Groups of settings: dataclasses whose fields are options; a program's settings inherit from the groups it has."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.capabilities import Use, require_together

Missing = dict[str, dict[str, Any]]  # a line by `requires` -> the fields that it proposes


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings of one feature; a group that reads the fields of another inherits from that.

    Each method is called for each class that defines it, bases first: a method never calls that of its base.
    """

    title: ClassVar[str]  # the heading in --help

    def check(self, given: set[str]) -> None:
        """Raise BadInput for values that cannot work; `given` are the fields that the command line names."""

    def missing(self) -> Missing:
        """What these settings require and lack."""
        return {}

    def uses(self) -> Iterable[Use]:
        """What these settings take from others, and what they need."""
        return ()

    # What a feature does once torch is there; see loop.draft.

    def outline(self, comm: Any, make: Callable[[], Any]) -> Any:
        """The model that `make` makes on meta, and what gives values to a part; None if a rank needs all of it."""

    def check_job(self, job: Any) -> None:
        """Raise BadInput for a Job that cannot be trained so."""

    def place(self, job: Any) -> Any:
        """Change the model before it goes to its device; a Layout if its replicas lie in another way."""

    def fill(self, draft: Any) -> None:
        """Fill slots of a Draft."""

    def members(self, parts: Any) -> Any:
        """A Membership if the ranks of the run may change; `parts` are those of the training."""


class Incomplete(BadInput):
    """Settings that work together but lack others; the message names all of them."""

    def __init__(self, message: str, settings: Any) -> None:
        super().__init__(message)
        self.settings = settings  # with what is proposed


def methods(settings: Group, name: str) -> Iterator[Callable[..., Any]]:
    """The method of this name of each class that defines it, bases first, as the fields of dataclasses are."""
    for kind in reversed(type(settings).__mro__):
        if name in vars(kind):
            yield vars(kind)[name].__get__(settings)


def check(settings: Group, given: set[str]) -> None:
    """Raise BadInput for values that cannot work, and for settings that do not work together."""
    for of_group in methods(settings, "check"):
        of_group(given)
    require_together(uses(settings))


def uses(settings: Group) -> list[Use]:
    """What the settings take from each other, and what they need."""
    return [use for of_group in methods(settings, "uses") for use in of_group()]


def require_complete(settings: Group) -> None:
    """Raise Incomplete for all that settings lack, or BadInput if the settings would not work with that."""
    missing: Missing = {}
    for of_group in methods(settings, "missing"):
        missing |= of_group()
    if not missing:
        return
    line = "; ".join(missing)
    complete = replace(settings, **{name: value for fields in missing.values() for name, value in fields.items()})
    try:
        check(complete, set())
    except BadInput as error:
        raise BadInput(f"{line}; but {error}") from None
    raise Incomplete(f"{line}.", complete)


def requires(subject: str, *options: str) -> str:
    """What is missing for a setting, as it is to be written."""
    return f"{subject} requires {' and '.join(options)}"
