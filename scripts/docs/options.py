"""docs/reference/options.md, from the settings of hvdtrain.effnet and hvdtrain.bert."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from hvdtrain.parallel.tensor.settings import TensorSettings
from hvdtrain.program.settings import Settings
from hvdtrain.settings.command_line import _docstrings, _kind, option
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import auto_fields, notes
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from scripts.docs.markdown import code, options_as_code, table
from tests import pairs

HEAD = """\
# Options of the programs

`python -m hvdtrain.effnet`, `python -m hvdtrain.bert` and a program of your own take these options. `--help` prints the
most used ones, `--help-all` all of them. [Recipes](#defaults-of-the-recipes) replace some defaults. `--[no-]NAME` is
switched on by `--NAME` and off by `--no-NAME`. The launcher's options are in [hvdlaunch](hvdlaunch.md).
"""
RECIPES = """\
## Defaults of the recipes

`--recipe` chooses the defaults: the first one of a program if it is not given. Options that are given replace them.
"""
CHOSEN = """\
## Fields that are not options

The program chooses these values. `config.json` in the run folder has them too. A program of your own may set another
default in its settings, for example `prefetch: int = 4`.
"""
PAIRS = """\
## Which options work together

`+` marks a pair that works: a test trains with it on real ranks. A letter is the reason why a pair is refused, in one
line and before any rank trains. Options that are not in this table work with all others, except for `--dry-run`, which
counts neither a model over several ranks nor a compiled one.
"""


def render() -> str:
    """Return the page."""
    lines = [HEAD]
    for title, kinds in _by_title(Settings).items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", *_options(Settings, kinds)]
    lines += ["## Images: hvdtrain.effnet", "", *_options(images.EffnetSettings, [images.EffnetSettings])]
    lines += ["## Texts: hvdtrain.bert", "", *_options(texts.BertSettings, [texts.BertSettings, TensorSettings])]
    lines += [RECIPES, *_recipes(images.RECIPES.values()), *_recipes(texts.RECIPES.values())]
    lines += [CHOSEN, *table(("field", "default", "why it is not an option", "meaning"), _chosen())]
    return "\n".join([*lines, PAIRS, pairs.table()]).rstrip() + "\n"


def _by_title(settings: type) -> dict[str, list[type]]:
    """Return the groups that settings inherit from, bases first, by their heading in --help."""
    groups: dict[str, list[type]] = {}
    for kind in reversed(settings.__mro__):
        if issubclass(kind, Group) and kind is not Group:
            groups.setdefault(kind.title, []).append(kind)
    return groups


def _options(settings: type, kinds: Sequence[type]) -> list[str]:
    """Return the table of the options that these classes of the settings declare."""
    not_options = auto_fields(settings)
    names = [name for kind in kinds for name in inspect.get_annotations(kind) if name != "title" and name.islower()]
    return table(("option", "default", "meaning"), [_row(settings, name) for name in names if name not in not_options])


def _row(settings: type, name: str) -> tuple[str, str, str]:
    hint, text = get_type_hints(settings)[name], _docstrings(settings).get(name, "")
    words, default = _words(settings, name, hint), _shown(_default(settings, name))
    return code(words), default, options_as_code(text)


def _words(settings: type, name: str, hint: Any) -> str:
    """Return the option with its value."""
    kind = _kind(name, hint, notes(settings)[name])
    if "action" in kind:
        return option(name).replace("--", "--[no-]", 1)
    word = "|".join(map(str, kind["choices"])) if "choices" in kind else kind["metavar"]
    return option(name) + (f"[={word}]" if "nargs" in kind else f" {word}")


def _default(settings: type, name: str) -> Any:
    [field] = [field for field in fields(settings) if field.name == name]
    return None if field.default is MISSING else field.default


def _shown(value: object) -> str:
    """Format a value for a command line."""
    return (
        {None: "", True: "yes", False: "no"}.get(value, code(value)) if isinstance(value, bool | None) else code(value)
    )


def _recipes(recipes: Iterable[Callable[[], Settings]]) -> list[str]:
    """Return a table of the fields in which the recipes of a program differ."""
    made = [recipe() for recipe in recipes]
    names = [field.name for field in fields(made[0]) if len({getattr(one, field.name) for one in made}) > 1]
    names = [name for name in names if name != "recipe"]
    columns = ["option", *(f"`{one.recipe}`" for one in made)]
    return table(columns, [(code(option(name)), *(_shown(getattr(one, name)) for one in made)) for name in names])


def _chosen() -> Iterator[tuple[str, str, str, str]]:
    for settings in (Settings, images.EffnetSettings):
        seen = {} if settings is Settings else auto_fields(Settings)
        for name, why in auto_fields(settings).items():
            if name not in seen:
                text = options_as_code(_docstrings(settings).get(name, ""))
                yield code(name), _shown(_default(settings, name)), options_as_code(why), text
