"""Groups of settings: dataclasses with fields that become options. A program's settings inherit from its groups."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from hvdtrain.settings.capabilities import Use, require_together
from hvdtrain.settings.safety.exits import BadInput

Missing = dict[str, dict[str, Any]]  # message from `requires` -> fields that it proposes


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings of one feature; a group that reads the fields of another inherits from it.

    Each method is called for every class that defines it, bases first: a method never calls its base's method.
    """

    title: ClassVar[str]  # the heading in --help

    def __init_subclass__(cls) -> None:
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # else @dataclass writes one with all fields

    def __repr__(self) -> str:
        defaults = ((f.name, f.default_factory() if callable(f.default_factory) else f.default) for f in fields(self))
        changed = (f"{name}={value!r}" for name, default in defaults if (value := getattr(self, name)) != default)
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, given: set[str]) -> None:
        """Raise BadInput for values that cannot work; `given` are the fields that the command line names."""

    def missing(self) -> Missing:
        """Return what these settings require but lack."""
        return {}

    def uses(self) -> Iterable[Use]:
        """Return which capabilities these settings take and need."""
        return ()

    # Methods called after the import of torch; see loop.draft.

    def check_job(self, job: Any) -> None:
        """Raise BadInput for a Job that this feature cannot train."""

    def place(self, job: Any) -> Any:
        """Change the model before it moves to its device; return a Layout if replicas are split."""

    def fill(self, draft: Any) -> None:
        """Fill slots of a Draft."""


class Incomplete(BadInput):
    """Valid settings that lack others; the message names all that are missing."""

    def __init__(self, message: str, settings: Any) -> None:
        super().__init__(message)
        self.settings = settings  # including the proposed ones


def methods(settings: Group, name: str) -> Iterator[Callable[..., Any]]:
    """Yield each class's method of this name, bases first, like the fields of dataclasses."""
    for kind in reversed(type(settings).__mro__):
        if name in vars(kind):
            yield vars(kind)[name].__get__(settings)


def check(settings: Group, given: set[str]) -> None:
    """Raise BadInput for values that cannot work, and for settings that do not work together."""
    for of_group in methods(settings, "check"):
        of_group(given)
    require_together(uses(settings))


def uses(settings: Group) -> list[Use]:
    """Return the capabilities that the settings take and need."""
    return [use for of_group in methods(settings, "uses") for use in of_group()]


def require_complete(settings: Group) -> None:
    """Raise Incomplete with all missing settings, or BadInput if the settings would not work with them."""
    missing: Missing = {}
    for of_group in methods(settings, "missing"):
        missing |= of_group()
    if not missing:
        return
    line = "; ".join(missing)
    complete = replace(settings, **{name: value for values in missing.values() for name, value in values.items()})
    try:
        check(complete, set())
    except BadInput as error:
        raise BadInput(f"{line}; but {error}") from None
    raise Incomplete(f"{line}.", complete)


def requires(subject: str, *options: str) -> str:
    """Return the message for a setting that requires options."""
    return f"{subject} requires {' and '.join(options)}"
