"""docs/reference/hvdlaunch.md, from the parser of hvdlaunch."""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping

from launch.cli.options import parser
from scripts.docs.markdown import code, options_as_code, table

HEAD = """\
# hvdlaunch: commands and options

`hvdlaunch COMMAND [options] [-- PROGRAM [ARGUMENT]...]`. `hvdlaunch COMMAND --help` prints the options of one command,
`hvdlaunch --version` the version and a digest of the code. The words after `--` are the program that the ranks run,
with its options: those of `hvdtrain.effnet` and `hvdtrain.bert` are in [options](options.md).
"""
SHARED = """\
## Options of several commands

Each of these means the same in all of its commands.
"""
LINK = "[options of several commands](#options-of-several-commands)"
Commands = Mapping[str, argparse.ArgumentParser]


def render() -> str:
    """Return the page."""
    commands = _commands()
    shared = {words: names for words, names in _users(commands).items() if len(names) > 1}
    lines = [HEAD, *table(("command", "what it does"), _summaries(commands))]
    for name, command in commands.items():
        lines += [f"## hvdlaunch {name}", "", *_usage(command)]
        own = [action for action in _options(command) if _words(action) not in shared]
        lines += table(("option", "meaning", "default"), map(_row, own)) if own else []
        if others := [_words(action)[0] for action in _options(command) if _words(action) in shared]:
            lines += [f"And {', '.join(map(code, others))}: {LINK}.", ""]
    lines += [SHARED]
    actions = {_words(action): action for command in commands.values() for action in _options(command)}
    rows = [(*_row(actions[words]), ", ".join(names)) for words, names in shared.items()]
    lines += table(("option", "meaning", "default", "commands"), rows)
    return "\n".join(lines).rstrip() + "\n"


def _commands() -> Commands:
    [found] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    commands: Commands = found.choices
    return commands


def _summaries(commands: Commands) -> Iterable[tuple[str, str]]:
    for name, command in commands.items():
        yield f"[`{name}`](#hvdlaunch-{name})", options_as_code(command.description or "")


def _usage(command: argparse.ArgumentParser) -> list[str]:
    """Return the example of --help, and the positional arguments."""
    example = (command.epilog or "").removeprefix("example: ")
    lines = ["```", example, "```", ""]
    for action in command._actions:
        if not action.option_strings and action.help not in (None, argparse.SUPPRESS):
            lines += [f"`{action.metavar or action.dest}`: {_help(command, action)}.", ""]
    return lines


def _users(commands: Commands) -> dict[tuple[str, ...], list[str]]:
    """Return the commands that have an option, by the option and its complete description."""
    users = defaultdict(list)
    for name, command in commands.items():
        for action in _options(command):
            users[_words(action)].append(name)
    return users


def _options(command: argparse.ArgumentParser) -> list[argparse.Action]:
    shown = [action for action in command._actions if action.option_strings and action.help != argparse.SUPPRESS]
    return [action for action in shown if "--help" not in action.option_strings]


def _words(action: argparse.Action) -> tuple[str, ...]:
    """Return the text of --help about an option."""
    return (*reversed(action.option_strings), _value(action), action.help or "")


def _value(action: argparse.Action) -> str:
    """Return the placeholder of its value; empty if it has none."""
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "|".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    return options_as_code(command._get_formatter()._expand_help(action))


def _row(action: argparse.Action) -> tuple[str, str, str]:
    """Return option with its value, meaning, default."""
    text, _, default = _help(parser(), action).partition("default: ")
    names = ", ".join(f"`{name} {_value(action)}`" if _value(action) else code(name) for name in action.option_strings)
    return names, text.rstrip("; ,"), default
