"""The settings of a program of somebody else: no recipe or several, and options of its own."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import pytest

from hvdtrain.program.settings import Settings, compared, parse
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.command_line import option
from hvdtrain.settings.notes import AT_LEAST_1, SHAPES, auto_fields, columns, marked
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text.settings import BertSettings
from hvdtrain.tasks.vision.settings import EffnetSettings
from tests.refusals import options_refused_together, refused


@dataclass(frozen=True, kw_only=True)
class Mine(Settings):
    """A network of my own."""

    data: str = "digits"
    model: str = "mlp"
    width: Annotated[int, AT_LEAST_1, SHAPES] = 64
    """Of the hidden layers."""
    wired: bool = False

    def uses(self) -> Iterable[Use]:
        if self.wired:
            yield Use(option="--wired", needs=(Capability.WORLD,))


def wide():
    return Mine(recipe="wide", width=512, lr=0.5)


def test_a_class_is_the_only_recipe_or_the_first_of_several():
    assert parse(["--width", "8", "--stages", "2", "--accumulate-steps", "2"], [Mine]).parts == ("--stages", 2)
    assert "Choose one of default" in refused(lambda: parse(["--recipe", "wide"], [Mine]))
    assert parse([], [Mine]) == parse([], [Mine, wide]) == Mine()
    assert parse(["--recipe", "wide", "--width", "8"], [Mine, wide]) == replace(wide(), width=8)


def test_its_options_have_rules_and_capabilities_beside_the_common_ones():
    assert refused(lambda: parse(["--width", "0"], [Mine])) == "--width 0: must be at least 1."
    assert options_refused_together(lambda: parse(["--wired", "--stages=2"], [Mine])) == {"--wired", "--stages 2"}
    assert {"width", "model", "seed"} <= set(marked(Mine, SHAPES))


def test_a_batch_of_each_rank_replaces_the_recipes_global_one():
    assert parse(["--batch-size-per-rank", "8"], [lambda: Mine(global_batch_size=64)]).global_batch_size is None


def test_what_follows_from_the_given_fields_is_filled_in():
    def resolve(settings, given):
        return replace(settings, wired="width" in given)

    assert not parse([], [Mine], resolve).wired
    assert parse(["--width", "9"], [Mine], resolve).wired


@pytest.mark.parametrize(
    ("spec", "command"),
    [(None, "python mine.py"), ("a.__main__", "python -m a")],
)
def test_help_names_the_command_and_the_options_of_the_program(monkeypatch, capsys, spec, command):
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec and type(sys.__spec__)(spec, None))
    with pytest.raises(SystemExit):
        parse(["--help"], [Mine])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {command} [--option value ...]\n\nA network of my own.\n")
    assert "--width INT" in shown
    for text in ("Of the hidden layers.", "Times that each sample is visited."):
        assert text in shown


def test_help_does_not_show_the_example_of_the_settings(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], [Settings])
    assert ">>>" not in capsys.readouterr().out


def test_settings_are_printed_with_what_differs_from_the_defaults_of_their_class(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py"])  # the default of `experiment`
    settings = Mine(lr=0.1, data="digits", width=65, experiment="mine")
    assert repr(settings) == "Mine(lr=0.1, width=65)"
    assert repr(replace(settings, experiment="other")) == "Mine(lr=0.1, experiment='other', width=65)"


@dataclass(frozen=True, kw_only=True)
class Plain(Settings):
    """One model, one data set, and options of its own."""

    epochs: int = 3
    width: int = 8
    begin_with: Path | None = None


@pytest.mark.parametrize("option_of_others", ["recipe", "data", "model"])
def test_a_program_does_not_have_the_options_of_others(capsys, option_of_others):
    with pytest.raises(SystemExit):
        parse(["--help-all"], [Plain])
    words = capsys.readouterr().out.split()
    assert "--width" in words
    assert option(option_of_others) not in words
    with pytest.raises(BadInput, match=f"--{option_of_others} default: not an option, since the program"):
        parse([option(option_of_others), "default"], [Plain])


def test_runs_are_compared_by_the_options_of_a_program():
    assert compared(Plain)[:4] == ("width", "begin_with", "global_batch", "peak_lr")
    assert not {"data", "model"} & set(compared(Plain))
    assert compared(EffnetSettings) == columns(EffnetSettings)  # it marks its columns itself


@pytest.mark.parametrize("kind", [EffnetSettings, BertSettings, Mine])
def test_each_option_stands_under_one_heading(capsys, kind):
    with pytest.raises(SystemExit):
        parse(["--help-all"], [kind])
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    names = {field.name for field in fields(kind)} - auto_fields(kind).keys() - {"recipe"}  # there is one
    assert sorted(word.rstrip(",") for word in shown) == sorted(map(option, names))
