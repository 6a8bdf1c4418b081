"""A command line from a dataclass of settings: its fields are the options, their docstrings the help."""

import argparse
import ast
import inspect
import itertools
import math
import os
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from hvdtrain.safety.exits import BadInput, launched_rank


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value must be, whatever the data and the machine; stands in a field's `Annotated`."""

    holds: Callable[[Any], bool]
    text: str  # what follows the option and its value in the complaint


AT_LEAST_1 = Rule(holds=lambda value: value >= 1, text="must be at least 1")
AT_LEAST_0 = Rule(holds=lambda value: 0 <= value < math.inf, text="must be a number of at least 0")
POSITIVE = Rule(
    holds=lambda value: 0 < value < math.inf, text="must be a number greater than 0; leave it out for the default"
)
PROBABILITY = Rule(holds=lambda value: 0 <= value < 1, text="must be at least 0 and less than 1")
FOLDER_NAME = Rule(
    holds=lambda name: name not in ("", ".", "..") and "/" not in name and name.isprintable(),
    text="must be one folder's name: put its parents into --runs-dir",
)


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What an option means that stands without its value; stands in a field's `Annotated`."""

    means: str


Settings = TypeVar("Settings", bound=Any)

Missing = dict[str, dict[str, Any]]  # a line by `requires` -> the fields that it proposes


class Incomplete(BadInput):
    """Settings that go together but lack others; the message names all of them."""

    def __init__(self, message: str, settings: Any) -> None:
        super().__init__(message)
        self.settings = settings  # with what is proposed


# What other programs call options, where the spelling does not lead here.
OF_OTHERS = {
    "--batch-size": ("--batch-size-per-rank", "--global-batch-size"),
    "--per-device-train-batch-size": ("--batch-size-per-rank",),
    "--gradient-accumulation-steps": ("--accumulate-steps",),
    "--learning-rate": ("--lr",),
    "--max-epochs": ("--epochs",),
    "--num-epochs": ("--epochs",),
    "--num-train-epochs": ("--epochs",),
    "--max-grad-norm": ("--clip-norm",),
    "--output-dir": ("--runs-dir",),
    "--resume-from-checkpoint": ("--run",),
    "--max-seq-length": ("--max-tokens",),
    **dict.fromkeys(("--amp", "--bf16", "--fp16"), ("--precision",)),
}


def parse(
    argv: Sequence[str], recipes: Mapping[str, Callable[[], Settings]], *, recipe: str, prog: str
) -> tuple[Settings, set[str]]:
    """The settings of a command line, and the fields that it names.

    `--recipe` chooses the function that returns the defaults, `recipe` where it is not given; the launcher's seed is
    the default of `--seed`, and it says whether the run is elastic. Raises BadInput, one line that names option and
    value.
    """
    words = [_with_dashes(word) for word in argv]
    chooser = _Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--recipe", default=recipe)
    name = chooser.parse_known_args([word for word in words if word not in ("-h", "--help")])[0].recipe
    if name not in recipes:
        raise BadInput(f"--recipe {name!r} is unknown: choose one of {', '.join(recipes)}")
    defaults = replace(recipes[name](), seed=_seed_of_launcher(recipes[name]().seed), **_elastic_of_launcher())
    help_is_asked = not {"-h", "--help"}.isdisjoint(words)
    parser = _parser(defaults, prog, texts=_docstrings(type(defaults)) if help_is_asked else None)
    if help_is_asked:
        if launched_rank() == 0:
            parser.print_help()
        raise SystemExit(0)
    known, stray = parser.parse_known_args(words)
    if stray:
        raise BadInput(_unknown(stray, [*parser._option_string_actions]))
    given = vars(known)
    settings = replace(defaults, **given)
    require_rules(settings)
    return settings, set(given)


def require_rules(settings: Any) -> None:
    """Raise BadInput for a value that breaks a rule of its field."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        for rule in (note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Rule)):
            if value is not None and not rule.holds(value):
                raise BadInput(f"{option(name)} {value if value != '' else repr(value)} {rule.text}")


def requires(subject: str, *options: str) -> str:
    """What is missing for a setting, as it is to be written."""
    return f"{subject} requires {' and '.join(options)}"


def require_complete(settings: Any, missing: Missing, check: Callable[[Any], None]) -> None:
    """Raise Incomplete for all that is `missing`, or BadInput where that would not pass the `check`."""
    if not missing:
        return
    line = "; ".join(missing)
    complete = replace(settings, **{name: value for fields in missing.values() for name, value in fields.items()})
    try:
        check(complete)
    except BadInput as error:
        raise BadInput(f"{line}; but {error}") from None
    raise Incomplete(line, complete)


def option(field: str) -> str:
    """A field's name as the option that sets it."""
    return "--" + field.replace("_", "-")


def _unknown(stray: Sequence[str], options: Sequence[str]) -> str:
    """What to say of words that no option takes: which one is most like the first, or does what others call so."""
    word, *others = stray
    if not word.startswith("--"):
        return f"{word}: not an option or the value of one. See --help."
    value = f" {others[0]}" if others and not others[0].startswith("--") else ""
    name = word.partition("=")[0]
    near = [own for own in OF_OTHERS.get(name, ()) if own in options]
    near = near or get_close_matches(name, options, 1, cutoff=0.75) or [one for one in options if one.startswith(name)]
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{word}{value}: unknown option.{meant} See --help."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{' '.join(message.split())}; see --help")


def _parser(defaults: Any, prog: str, texts: Mapping[str, str] | None) -> argparse.ArgumentParser:
    """The options of these settings; without `texts`, which take most of the time, it can print no help."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--option value ...]",
        description=inspect.getdoc(type(defaults)),
        argument_default=argparse.SUPPRESS,  # so that only what was given comes back
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    hints = get_type_hints(type(defaults), include_extras=True)
    for title, names in _groups(defaults).items():
        group = parser.add_argument_group(title)
        for name in names:
            value = getattr(defaults, name)
            text = f"{texts[name]} (default: {'none' if value is None else value})" if texts else ""
            group.add_argument(option(name), dest=name, help=text.replace("%", "%%"), **_kind(hints[name]))
    return parser


def _groups(defaults: Any) -> dict[str, list[str]]:
    """The fields by the title of their group in --help, the most used ones first."""
    groups: dict[str, list[str]] = {"most used": list(defaults.MOST_USED)}
    names: list[str] = []
    for field in fields(defaults):
        if field.name in defaults.GROUPS:
            names = groups.setdefault(defaults.GROUPS[field.name], [])
        if field.name not in defaults.MOST_USED:
            names.append(field.name)
    return groups


def _kind(hint: Any) -> dict[str, Any]:
    """What argparse must know of a type: bool, a Literal, or one that is called with the word."""
    more: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        more = next(({"nargs": "?", "const": note.means} for note in notes if isinstance(note, Alone)), {})
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "type": type(get_args(hint)[0]), **more}
    assert hint in (int, float, str, Path)
    return {"type": hint, "metavar": hint.__name__.upper(), **more}


def _docstrings(settings: type) -> dict[str, str]:
    """The string below each field of a dataclass and of those that it inherits from."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__[:-1]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(below.value, ast.Constant)
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _with_dashes(word: str) -> str:
    """--batch_size_per_rank=8 as --batch-size-per-rank=8."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def _seed_of_launcher(default: int) -> int:
    """The seed where --seed is not given: a sweep sets it, another one for each run of a size."""
    seed = os.environ.get("HVDLAUNCH_SEED", str(default))
    if not (seed.isascii() and seed.isdecimal()):
        raise BadInput(f"HVDLAUNCH_SEED {seed!r} must be a number of at least 0: correct it in the environment")
    return int(seed)


def _elastic_of_launcher() -> dict[str, Any]:
    """What an elastic run of hvdlaunch gives: the fewest ranks that may go on, and whether others join."""
    least = os.environ.get("HVDLAUNCH_ELASTIC")
    if least is None:
        return {}
    if not (least.isascii() and least.isdecimal() and int(least)):
        raise BadInput(f"HVDLAUNCH_ELASTIC {least!r} must be a number of at least 1: correct it in the environment")
    return {"elastic": True, "min_np": int(least), "grow": "HVDLAUNCH_GROW" in os.environ}
