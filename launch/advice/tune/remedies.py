"""The remedies that a program proposes: the JSON of `PROGRAM ARGS --remedies`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.documents import Document
from launch.documents import parse as parse_json
from launch.errors import CommandError, ProcessError, harmless
from launch.files import read_text
from launch.process import ask

ANSWER_S = 120.0  # importing a framework takes seconds, much longer from a cold disk
_SHOWN = 200  # characters of a program's standard error
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of the command line that may make a training faster."""

    name: str
    options: tuple[str, ...]  # added after those of the command line
    environment: tuple[tuple[str, str], ...] = ()  # variables of the ranks, and their values
    what_for: str  # the part of a step that it shortens, named as in the windows' shares
    same_training: bool  # False: the weights change by more than noise, so accuracy must be checked
    not_with: tuple[str, ...] = ()  # the names of remedies that the program rejects together with it


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The proposals of a program."""

    remedies: tuple[Remedy, ...]
    measure: tuple[str, ...] = ()  # options of every start: no checkpoints, for example, and no early end
    profile: tuple[str, ...] = ()  # options of the start that measures the shares of a step
    epochs: float | None = None  # of the full training, for the cost of a confirmation


def ask_program(program: Sequence[str], environment: Mapping[str, str]) -> Catalogue:
    """Start the program once without ranks to list its remedies; CommandError for an invalid answer."""
    _require_remedies(program)
    subject = f"{' '.join(program)} --remedies"
    try:
        answer = ask([*program, "--remedies"], timeout_s=ANSWER_S, env=environment, ends_daemons=True)
    except ProcessError as error:
        raise CommandError(f"{subject}: {error}. The program must print its remedies as JSON.") from error
    if answer.status:
        last = harmless((answer.err.strip().splitlines() or ["nothing on standard error"])[-1])[:_SHOWN]
        raise CommandError(
            f"{subject}: ended with status {answer.status} ({last}). The program must print its remedies as JSON."
        )
    try:
        return parse(parse_json(answer.out))
    except ValueError as error:
        raise CommandError(f"{subject}: {error}. The program must print its remedies as JSON, and no more.") from error


def _require_remedies(program: Sequence[str]) -> None:
    """Raise CommandError for a Python script without the word remedies: it would train instead of listing them."""
    script = next((word for word in program if word in ("-m", "-c") or word.endswith(".py")), "-m")
    try:
        text = "hvdtrain" if script in ("-m", "-c") else read_text(Path(script))
    except (OSError, ValueError):  # in an image, or no text
        return
    if any(word in text for word in ("remedies", "hvdtrain")):
        return
    fix = "Print its remedies for --remedies (docs/how-to/tune.md), or name them in a comment if another file does."
    if "Trainer" in text and "transformers" in text:
        after = shlex.join(program[list(program).index(script) :])
        fix = f"It uses transformers' Trainer: tune python -m hvdtrain.trainer {after}"
    raise CommandError(f"{script} has no remedies to tune. {fix}")


def parse(answer: Any) -> Catalogue:
    """Parse the remedies of a document; ValueError names the problem."""
    document = Document(answer)
    items = enumerate(document.list("remedies"), start=1)
    remedies = tuple(_remedy(Document(item, f"remedy {number}")) for number, item in items)
    names = [remedy.name for remedy in remedies]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two remedies are named {sorted(twice)[0]!r}")
    return Catalogue(
        remedies=remedies,
        measure=_words(document, "measure"),
        profile=_words(document, "profile"),
        epochs=document.optional_number("epochs", 1e-6, 1e9),
    )


def _remedy(item: Document) -> Remedy:
    name, what_for, same = item.text("name"), item.text("what_for"), item.values.get("same_training")
    if not isinstance(same, bool):
        raise ValueError(f"remedy {name!r}: same_training is {same!r}, not true or false")
    environment = item.values.get("environment", {})
    if not isinstance(environment, dict) or not all(
        VARIABLE.fullmatch(key) and not key.startswith("HVDLAUNCH_") and isinstance(value, str)
        for key, value in environment.items()
    ):
        raise ValueError(f"remedy {name!r}: environment is not an object of texts by names that are not HVDLAUNCH_*")
    options = _words(item, "options")
    if not options and not environment:
        raise ValueError(f"remedy {name!r} changes nothing: it has neither options nor an environment")
    return Remedy(
        name=name,
        options=options,
        environment=tuple(sorted(environment.items())),
        what_for=what_for,
        same_training=same,
        not_with=_words(item, "not_with"),
    )


def _words(document: Document, key: str) -> tuple[str, ...]:
    words = document.list(key) if key in document.values else []
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{key}: not a list of texts")
    return tuple(words)
