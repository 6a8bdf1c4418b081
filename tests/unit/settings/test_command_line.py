import dataclasses
import re

import pytest

import hvdtrain
from hvdtrain.program.settings import parse as parse_settings
from hvdtrain.settings.command_line import REPLACED
from hvdtrain.settings.notes import auto_fields
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text import settings as text_settings
from hvdtrain.tasks.vision import settings as vision_settings
from hvdtrain.tasks.vision.settings import EffnetSettings, parse
from launch.cli.options import parser
from tests.refusals import refused


def test_the_launchers_seed_is_taken_where_none_is_given(monkeypatch):
    monkeypatch.setenv("HVDLAUNCH_SEED", "7")
    assert parse([]).seed == parse(["--recipe", "book"]).seed == 7
    assert parse(["--seed", "0"]).seed == 0


@pytest.mark.parametrize("seed", ["''", "-1", "one", "4294967296"])
def test_a_bad_seed_of_the_launcher_is_named(monkeypatch, seed):
    monkeypatch.setenv("HVDLAUNCH_SEED", seed.strip("'"))
    with pytest.raises(BadInput, match=seed):
        parse([])


@pytest.mark.parametrize("words", [["--recipe=book", "--lr=0.3"], ["--lr", "0.3", "--recipe", "book"]])
def test_an_option_changes_the_recipe_wherever_it_stands(words):
    assert parse(words) == dataclasses.replace(vision_settings.book(), lr=0.3)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("--profile --lr 0.3", "on"),
        ("--profile off --lr 0.3", "off"),
        ("--profile=exact", "exact"),
        ("--profile exact --profile", "on"),
        ("--profile trace:5", "on"),
    ],
)
def test_profile_alone_means_on_and_so_does_a_trace(words, mode):
    lr = 0.3 if "--lr" in words else None
    steps = 5 if "trace:5" in words else None
    assert parse(words.split()) == dataclasses.replace(EffnetSettings(), profile=mode, lr=lr, torch_profile=steps)


@pytest.mark.parametrize("name", ["", "/", "/a", "a//", "a/b/", "a/b/c", "../a", "a/..", "a\nb", "a/b\n"])
def test_a_run_is_a_folder_or_one_in_a_named_experiment(name):
    with pytest.raises(BadInput, match=r"(?s)^--run .*: must be NAME, EXPERIMENT/NAME or EXPERIMENT/"):
        parse(["--run", name])


@pytest.mark.parametrize(
    ("words", "names"),
    [([], ("effnet", "")), (["--run=a"], ("effnet", "a")), (["--run=e/a"], ("e", "a")), (["--run=e/"], ("e", ""))],
)
def test_a_run_without_an_experiment_is_in_that_of_the_program(words, names):
    assert parse(words).run_names == names


def helped(capsys, parse, *words):
    with pytest.raises(SystemExit) as leaving:
        parse([*words])
    assert leaving.value.code == 0
    return capsys.readouterr().out


OPTION = re.compile(r"^  (--[a-z0-9-]+)[^\n]*(?:\n {32}[^\n]*)*", re.M)


@pytest.mark.parametrize("program", [vision_settings, text_settings], ids=["effnet", "bert"])
def test_help_shows_the_fifteen_most_used_and_where_the_others_are(capsys, program):
    most_used = OPTION.findall(helped(capsys, program.parse, "--help"))
    everything = helped(capsys, program.parse, "--help-all")
    others = [name for name in OPTION.findall(everything) if name not in most_used]
    assert len(most_used) == 15
    last_line = helped(capsys, program.parse, "-h").splitlines()[-1]
    assert last_line == f"--help-all shows the other {len(others)} options, in groups."
    assert "--help-all" not in everything


@pytest.mark.parametrize(
    ("program", "words", "complaint"),
    [
        (vision_settings, "--epoch 3", "--epoch 3: unknown option. Did you mean --epochs? See --help."),
        (vision_settings, "--batch_size=3", "--batch-size=3: unknown option. Did you mean --batch-size-per-rank or "),
        (vision_settings, "--learning-rate 3", "Did you mean --lr?"),
        (vision_settings, "--no-sync-bm", "Did you mean --no-sync-bn?"),
        (vision_settings, "--bogus --epochs 3", "--bogus: unknown option. See --help."),
        (text_settings, "--max-seq-length 3", "Did you mean --max-tokens?"),
        (
            vision_settings,
            "--epochs 99999999999999999999999",
            "--epochs 99999999999999999999...: must be less than 2**53.",
        ),
        (vision_settings, "--runs-dir caf\udce9", "'caf\\udce9': not UTF-8. Rename"),
        (vision_settings, "--global-batch-size 9 --batch-size-per-rank=8", "--batch-size-per-rank 8 both set the"),
        (vision_settings, "--batch-size-per-rank auto", "--batch-size-per-rank auto requires --global-batch-size"),
        (vision_settings, "--seed 1 --lr", "--lr"),
        (vision_settings, "--seed 1 --recipe", "--recipe"),
        (text_settings, "stray", "stray: not an option or the value of one. See --help."),
    ],
)
def test_words_that_cannot_be_taken_are_one_line(program, words, complaint):
    assert complaint in refused(lambda: program.parse(words.split()))


@pytest.mark.parametrize("former", REPLACED)
def test_a_former_option_names_what_replaces_it(capsys, former):
    line = refused(lambda: text_settings.parse([former, "3"]))
    assert line == f"{former} 3: not an option any more. Pass {REPLACED[former]}."
    options = [OPTION.findall(helped(capsys, one.parse, "--help-all")) for one in (vision_settings, text_settings)]
    options.append(OPTION.findall(helped(capsys, parser().parse_args, "run", "--help")))
    assert {*re.findall("--[a-z0-9-]+", REPLACED[former])} <= set().union(*options)


def test_help_is_printed_by_rank_0_alone(capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(SystemExit) as leaving:
        parse(["--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("program", [vision_settings, text_settings], ids=["effnet", "bert"])
def test_the_answer_to_an_option_of_what_the_program_chooses_says_why_it_needs_none(capsys, program):
    fields = auto_fields(type(program.parse([])))
    assert ("workers" in fields, "stem_stride" in fields) == (True, program is vision_settings)
    everything = helped(capsys, program.parse, "--help-all")
    for name, why in fields.items():
        word = f"--{name.replace('_', '-')}"
        expected = f": not an option, since {why}. Leave it out."
        assert refused(lambda word=word: program.parse([word, "3"])) == f"{word} 3{expected}"
        assert refused(lambda word=word: program.parse([f"{word}=3", "--seed", "1"])) == f"{word}=3{expected}"
        negated = word.replace("--", "--no-")
        assert refused(lambda word=negated: program.parse([word])) == f"{negated}{expected}"
        assert f"{word} " not in everything


def test_a_program_of_ones_own_sets_what_others_leave_to_the_program():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(hvdtrain.Settings):
        workers: int | None = 3

    assert parse_settings([], [Settings]).workers == 3
    assert "not an option" in refused(lambda: parse_settings(["--workers", "4"], [Settings]))
