"""A command line derived from a dataclass of settings: fields are options, their docstrings the help."""

import argparse
import ast
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import Alone, Rule, auto_fields, notes
from hvdtrain.settings.safety.exits import BadInput, launched_rank

S = TypeVar("S", bound=Any)

_HELP = {"-h", "--help", "--help-all"}
MOST = 2**53  # from here on a float, as in JSON and TensorBoard, cannot hold each number

# Options of other programs that get_close_matches does not map to ours.
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

# Former options and what replaces them.
REPLACED: dict[str, str] = {
    "--tf32": "--precision tf32",
    "--no-tf32": "--precision fp32",
    "--timeline": "--profile timeline",
    "--no-timeline": "--profile off",
    "--json": "--dry-run json",
    "--no-json": "--dry-run",
    "--device": "--dry-run v100, a100, h100 or h200",
    **dict.fromkeys(("--text-column", "--label-column"), "--columns TEXT,LABEL"),
    "--pair-column": "--columns TEXT,PAIR,LABEL",
    "--remedies": "it to a program that calls hvdtrain.start",
    **dict.fromkeys(("--no-dry-run", "--no-remedies"), "nothing instead"),
    "--checkpoint-every-s": "--checkpoint-every 60s or --checkpoint-every auto",
    "--checkpoint-every-steps": "--checkpoint-every 100steps",
    "--cutout": "--augment cutout:16",
    **dict.fromkeys(("--elastic", "--grow", "--no-elastic", "--no-grow"), "--restarts 5 to hvdlaunch run, before --"),
    "--min-np": "it to hvdlaunch run, before --, with --restarts",
    "--no-augment": "--augment none",
    "--stages-at": "--stages 0,B with the first block of each stage",
    "--sync-every": "--sync local:K or --sync local:K@E",
    "--sync-group-size": "--sync two-level/N or --sync local:K/N",
}


def parse(argv: Sequence[str], recipes: Mapping[str, Callable[[], S]], *, prog: str) -> tuple[S, set[str]]:
    """Parse a command line into settings and the set of fields that it names.

    `--recipe` chooses the function that returns the defaults; otherwise the first is used. The launcher sets the
    default of `--seed`. Raise BadInput, one line that names the option and the value.
    """
    for word in argv:
        if word != word.encode(errors="replace").decode():  # TensorBoard and JSON files hold UTF-8 only
            raise BadInput(f"{word!a}: not UTF-8. Rename the file or folder.")
    words = [_with_dashes(word) for word in argv]
    chooser = _Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--recipe", default=next(iter(recipes)))
    name = chooser.parse_known_args([word for word in words if word not in _HELP])[0].recipe
    if name not in recipes:
        raise BadInput(f"--recipe {name!r}: unknown. Choose one of {', '.join(recipes)}.")
    defaults = replace(recipes[name](), seed=_seed_of_launcher(recipes[name]().seed))
    not_options = auto_fields(type(defaults))
    if len(recipes) == 1:
        not_options = {"recipe": "the program has one set of defaults", **not_options}
    if not _HELP.isdisjoint(words):
        if launched_rank() == 0:
            _print_help(defaults, prog, not_options, has_all="--help-all" in words)
        raise SystemExit(0)
    parser = _parser(defaults, prog, _groups(defaults, not_options))
    known, stray = parser.parse_known_args(words)
    if stray:
        raise BadInput(_unknown(stray, [*parser._option_string_actions], not_options))
    given = vars(known)
    settings = replace(defaults, **given)
    require_rules(settings)
    return settings, set(given)


def require_rules(settings: Any) -> None:
    """Raise BadInput for a value that breaks a rule of its field."""
    by_field = notes(type(settings))
    for field in fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if isinstance(value, int) and abs(value) >= MOST:
            raise BadInput(f"{option(name)} {str(value)[:20]}...: must be less than 2**53.")
        for rule in (note for note in by_field[name] if isinstance(note, Rule)):
            if value is not None and not rule.holds(value):
                raise BadInput(f"{option(name)} {value if value != '' else repr(value)}: {rule.text}.")


def option(field: str) -> str:
    """Return the option that sets a field."""
    return "--" + field.replace("_", "-")


def _unknown(stray: Sequence[str], options: Sequence[str], auto_fields: Mapping[str, str]) -> str:
    """Describe an unknown option: the value that the program chooses instead, or similar options."""
    word, *others = stray
    if not word.startswith("--"):
        return f"{word}: not an option or the value of one. See --help."
    value = f" {others[0]}" if others and not others[0].startswith("--") else ""
    name = word.partition("=")[0]
    for field, why in auto_fields.items():
        if name in (option(field), option(f"no_{field}")):
            return f"{word}{value}: not an option, since {why}. Leave it out."
    if name in REPLACED:
        return f"{word}{value}: not an option any more. Pass {REPLACED[name]}."
    near = [own for own in OF_OTHERS.get(name, ()) if own in options]
    near = near or get_close_matches(name, options, 1, cutoff=0.75) or [one for one in options if one.startswith(name)]
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{word}{value}: unknown option.{meant} See --help."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{' '.join(message.removeprefix('argument ').split())}. See --help.")


def _print_help(defaults: Any, prog: str, not_options: Container[str], *, has_all: bool) -> None:
    groups = _groups(defaults, not_options)
    shown = groups if has_all else dict([next(iter(groups.items()))])
    left_out = sum(map(len, groups.values())) - sum(map(len, shown.values()))
    parser = _parser(defaults, prog, shown, texts=_docstrings(type(defaults)))
    parser.epilog = f"--help-all shows the other {left_out} options, in groups." if left_out else None
    parser.print_help()


def _parser(
    defaults: Any, prog: str, groups: Mapping[str, Sequence[str]], texts: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """Make the parser of these settings. Without `texts`, which take most of the time, it cannot print help."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--option value ...]",
        description=(inspect.getdoc(type(defaults)) or "").partition("\n\n>>> ")[0],  # without its example
        add_help=False,
        argument_default=argparse.SUPPRESS,  # returns only what was given
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    hints, by_field = get_type_hints(type(defaults)), notes(type(defaults))
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            value = getattr(defaults, name)
            text = f"{texts.get(name, '')} (default: {'none' if value is None else value})".strip() if texts else ""
            group.add_argument(
                option(name), dest=name, help=text.replace("%", "%%"), **_kind(name, hints[name], by_field[name])
            )
    return parser


def _groups(defaults: Any, not_options: Container[str]) -> dict[str, list[str]]:
    """Return the options by the group title of --help, with the most used and the program's own first."""
    kind = type(defaults)
    options = [field.name for field in fields(defaults) if field.name not in not_options]
    added = () if "MOST_USED" in vars(kind) else [name for name in inspect.get_annotations(kind) if name in options]
    most_used = [name for name in (*defaults.MOST_USED, *added) if name in options]
    groups: dict[str, list[str]] = {"most used": [*dict.fromkeys(most_used)]}
    options = [name for name in options if name not in groups["most used"]]
    for base in (base for base in reversed(kind.__mro__) if issubclass(base, Group)):
        for name in inspect.get_annotations(base):
            if name in options:
                groups.setdefault(base.title, []).append(name)
                options.remove(name)
    return groups


def _kind(name: str, hint: Any, at_field: Sequence[Any]) -> dict[str, Any]:
    """Return argparse's arguments for a type: bool, a Literal, or a callable that takes a string."""
    more = next(({"nargs": "?", "const": note.means} for note in at_field if isinstance(note, Alone)), {})
    if get_origin(hint) in (Union, types.UnionType):
        (hint, *words) = (kind for kind in get_args(hint) if kind is not type(None))
        if words:
            names = get_args(words[0])
            return {"type": _number_or(hint, names), "metavar": "|".join([hint.__name__.upper(), *names])}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "type": type(get_args(hint)[0]), **more}
    if hint not in (int, float, str, Path):
        raise BadInput(f"{option(name)}: {hint} cannot be an option. Use bool, int, float, str, Path or a Literal.")
    return {"type": hint, "metavar": hint.__name__.upper(), **more}


def _number_or(kind: Callable[[str], float], words: Sequence[str]) -> Callable[[str], float | str]:
    """Return a parser for a number of this kind, or one of these words."""

    def number(text: str) -> float | str:
        return text if text in words else kind(text)

    return number


def _docstrings(settings: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and its bases."""
    texts: dict[str, str] = {}
    trees: dict[str, ast.Module] = {}  # each file is parsed once; parsing takes most of the time of --help
    for kind in reversed(settings.__mro__[:-1]):
        if kind.__module__ not in trees:
            trees[kind.__module__] = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
        classes = [node for node in ast.walk(trees[kind.__module__]) if isinstance(node, ast.ClassDef)]
        tree = next(node for node in classes if node.name == kind.__name__)
        for field, below in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(below.value, ast.Constant)
                texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


def _with_dashes(word: str) -> str:
    """Turn --batch_size_per_rank=8 into --batch-size-per-rank=8."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def _seed_of_launcher(default: int) -> int:
    """Return the seed if --seed is not given: a sweep sets a different one for each run of a size."""
    seed = os.environ.get("HVDLAUNCH_SEED", str(default))
    if not (seed.isascii() and seed.isdecimal()):
        raise BadInput(f"HVDLAUNCH_SEED {seed!r}: must be a number of at least 0. Correct it in the environment.")
    return int(seed)
