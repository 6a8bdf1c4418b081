import dataclasses
import re
from pathlib import Path

import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.text import config as text_config
from hvdtrain.vision import config
from hvdtrain.vision.config import EffnetConfig, parse
from tests.refusals import refused

OPTIONS = [
    ("--data digits", "digits"),
    ("--data-dir some/where", Path("some/where")),
    ("--model efficientnet_tiny", "efficientnet_tiny"),
    ("--pretrained hub", "hub"),
    ("--stem-stride 1", 1),
    ("--dropout 0.0", 0.0),
    ("--stochastic-depth 0.4", 0.4),
    ("--recipe scaled", "scaled"),
    ("--epochs 7", 7),
    ("--batch-size-per-rank 12", 12),
    ("--global-batch-size 96", 96),
    ("--accumulate-steps 3", 3),
    ("--pipeline-schedule gpipe --stages 2 --accumulate-steps 2", "gpipe"),
    ("--recompute", True),
    ("--stages 2 --accumulate-steps 2", 2),
    ("--stages-at 3 --stages 2 --accumulate-steps 2", "3"),
    ("--optimizer adamw", "adamw"),
    ("--optimizer lars", "lars"),
    ("--optimizer lamb", "lamb"),
    ("--lr 0.02", 0.02),
    ("--no-scale-lr", False),
    ("--schedule constant", "constant"),
    ("--warmup-epochs 0.5", 0.5),
    ("--weight-decay 0", 0.0),
    ("--decay-all", True),
    ("--label-smoothing 0", 0.0),
    ("--ema-epochs 0", 0.0),
    ("--no-normalize", False),
    ("--no-augment", False),
    ("--cutout 8", 8),
    ("--sync-bn", True),
    ("--max-skipped-steps 3", 3),
    ("--report-every-steps 5", 5),
    ("--check-replicas-every 0", 0),
    ("--check-replicas-every 100", 100),
    ("--find-nan", True),
    ("--no-tf32", False),
    ("--clip-value 0.5", 0.5),
    ("--clip-norm 1", 1.0),
    ("--precision bf16", "bf16"),
    ("--no-channels-last", False),
    ("--compile", True),
    ("--compression fp16", "fp16"),
    ("--compression powersgd:2", "powersgd:2"),
    ("--sync two-level", "two-level"),
    ("--sync-every 16@5 --sync local", "16@5"),
    ("--sync-group-size 4 --sync two-level", 4),
    ("--reducer horovod", "horovod"),
    ("--elastic", True),
    ("--grow --elastic", True),
    ("--min-np 2 --elastic", 2),
    ("--fusion-threshold-mb 0", 0.0),
    ("--fusion-threshold-mb 64", 64.0),
    ("--fusion-groups 2 --reducer horovod", 2),
    ("--cycle-time-ms 2.5", 2.5),
    ("--profile", "on"),
    ("--profile exact", "exact"),
    ("--torch-profile 5", 5),
    ("--timeline", True),
    ("--seed 11", 11),
    ("--runs-dir else/where", Path("else/where")),
    ("--experiment mine", "mine"),
    ("--run first", "first"),
    ("--overwrite", True),
    ("--deterministic", True),
    ("--resume never", "never"),
    ("--checkpoint-every-s 7.5", 7.5),
    ("--checkpoint-every-steps 12", 12),
    ("--keep 5", 5),
    ("--max-unreadable-images 3", 3),
    ("--hang-timeout-s 30", 30.0),
    ("--workers 0", 0),
    ("--workers 3", 3),
    ("--prefetch 0", 0),
    ("--prefetch 4", 4),
]


def test_the_scaled_recipe_is_the_default():
    assert parse(["--seed", "0"]) == parse(["--recipe", "scaled"]) == config.scaled() == EffnetConfig()


def test_the_launchers_seed_is_taken_where_none_is_given(monkeypatch):
    monkeypatch.setenv("HVDLAUNCH_SEED", "7")
    assert parse([]).seed == parse(["--recipe", "book"]).seed == 7
    assert parse(["--seed", "0"]).seed == 0


@pytest.mark.parametrize("seed", ["''", "-1", "one", "1.5", "4294967296"])
def test_a_bad_seed_of_the_launcher_is_named(monkeypatch, seed):
    monkeypatch.setenv("HVDLAUNCH_SEED", seed.strip("'"))
    with pytest.raises(BadInput, match=seed):
        parse([])


@pytest.mark.parametrize("words", [["--recipe", "book"], ["--recipe=book"], ["--recipe", "scaled", "--recipe", "book"]])
def test_book_recipe(words):
    assert parse(words) == EffnetConfig(
        recipe="book",
        model="efficientnet_b7",
        pretrained="hub",
        optimizer="adam",
        lr=1e-4,
        scale_lr=False,
        schedule="constant",
        warmup_epochs=0.0,
        weight_decay=0.005,
        decay_all=True,
        label_smoothing=0.0,
        ema_epochs=0.0,
        normalize=False,
        augment=False,
        channels_last=False,
    )


def test_a_recipe_with_pretrained_weights_can_do_without():
    assert parse(["--recipe", "book", "--pretrained", "none"]) == dataclasses.replace(config.book(), pretrained=None)


@pytest.mark.parametrize(
    "words", [["--recipe", "book", "--lr", "0.3"], ["--recipe=book", "--lr=0.3"], ["--lr", "0.3", "--recipe", "book"]]
)
def test_an_option_changes_the_recipe_wherever_it_stands(words):
    assert parse(words) == dataclasses.replace(config.book(), lr=0.3)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("--profile", "on"),
        ("--profile --lr 0.3", "on"),
        ("--lr 0.3 --profile", "on"),
        ("--profile off --lr 0.3", "off"),
        ("--profile=exact", "exact"),
        ("--profile=off", "off"),
        ("--profile exact --profile", "on"),
    ],
)
def test_profile_alone_means_on(words, mode):
    lr = 0.3 if "--lr" in words else None
    assert parse(words.split()) == dataclasses.replace(EffnetConfig(), profile=mode, lr=lr)


def test_recipes_carry_their_own_name():
    assert {name: recipe().recipe for name, recipe in config.RECIPES.items()} == {"scaled": "scaled", "book": "book"}


WITH_IT = {  # what an option does not stand without
    "pipeline_schedule": {"stages": 2, "accumulate_steps": 2},
    "grow": {"elastic": True},
    "min_np": {"elastic": True},
    "fusion_groups": {"reducer": "horovod"},
    "stages": {"accumulate_steps": 2},
    "sync_every": {"sync": "local"},
    "sync_group_size": {"sync": "two-level"},
    "stages_at": {"stages": 2, "accumulate_steps": 2},
}


@pytest.mark.parametrize(("words", "expected"), OPTIONS)
def test_each_option_sets_its_field_and_no_other(words, expected):
    field = words.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    assert parse(words.split()) == dataclasses.replace(EffnetConfig(), **{field: expected, **WITH_IT.get(field, {})})


def test_the_list_above_knows_every_option():
    words = {words.split()[0].removeprefix("--").removeprefix("no-") for words, _ in OPTIONS}
    assert words == {field.name.replace("_", "-") for field in dataclasses.fields(EffnetConfig)}


@pytest.mark.parametrize(
    "words",
    [
        "--model resnet50",
        "--data mnist",
        "--recipe best",
        "--stem-stride 3",
        "--optimizer adagrad",
        "--schedule step",
        "--precision fp8",
        "--compression zip",
        "--reducer nccl",
        "--epochs abc",
        "--epochs 1.5",
        "--epochs 0",
        "--batch-size-per-rank 0",
        "--batch-size-per-rank -8",
        "--accumulate-steps 0",
        "--global-batch-size 0",
        "--global-batch-size -64",
        "--global-batch-size 1.5",
        "--max-skipped-steps 0",
        "--max-skipped-steps -1",
        "--report-every-steps 0",
        "--profile fast",
        "--torch-profile 0",
        "--torch-profile -3",
        "--torch-profile all",
        "--check-replicas-every -1",
        "--check-replicas-every often",
        "--fusion-groups 0",
        "--fusion-groups -2",
        "--lr -1",
        "--lr 0",
        "--lr nan",
        "--lr inf",
        "--weight-decay inf",
        "--fusion-threshold-mb inf",
        "--seed 4294967296",
        "--lr fast",
        "--clip-value 0",
        "--clip-value -2",
        "--clip-norm 0",
        "--clip-norm nan",
        "--fusion-threshold-mb -1",
        "--cycle-time-ms 0",
        "--warmup-epochs -1",
        "--warmup-epochs nan",
        "--weight-decay -3",
        "--ema-epochs -1",
        "--cutout -1",
        "--seed -1",
        "--seed one",
        "--dropout 1",
        "--stochastic-depth -0.5",
        "--label-smoothing 1",
        "--run ../x",
        "--run ..",
        "--run a/b",
        "--experiment a/b",
        "--experiment .",
        "--workers -1",
        "--workers 1.5",
        "--workers auto",
        "--prefetch -1",
        "--prefetch 0.5",
        "--bogus 1",
        "--epoch 3",
    ],
)
def test_a_bad_value_is_one_line_that_names_option_and_value(words):
    option, value = words.split()
    with pytest.raises(BadInput) as error:
        parse([option, value])
    message = str(error.value)
    assert "\n" not in message
    assert option in message
    assert value in message.replace(option, "")


@pytest.mark.parametrize("option", ["--lr", "--recipe", "--data-dir", "--run"])
def test_an_option_without_its_value_is_named(option):
    with pytest.raises(BadInput) as error:
        parse(["--seed", "1", option])
    message = str(error.value)
    assert "\n" not in message
    assert option in message


@pytest.mark.parametrize("words", [["stray"], ["--overwrite", "yes"], ["--runs-dir", "a", "b"]])
def test_a_stray_word_is_named(words):
    with pytest.raises(BadInput, match=words[-1]):
        parse(words)


@pytest.mark.parametrize("option", ["--experiment", "--run"])
def test_an_empty_name_is_refused(option):
    with pytest.raises(BadInput, match=f"^{option} '' must be one folder's name"):
        parse([option, ""])


@pytest.mark.parametrize("columns", ["20", "300"])
@pytest.mark.parametrize("words", [["--precision", "fp8"], ["--bogus", "1"], ["--epochs", "abc"]])
def test_a_complaint_does_not_depend_on_the_terminal(monkeypatch, words, columns):
    with pytest.raises(BadInput) as plain:
        parse(words)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(BadInput) as error:
        parse(words)
    assert str(error.value) == str(plain.value)


def test_a_bad_command_line_prints_nothing_itself(capsys):
    with pytest.raises(BadInput):
        parse(["--epochs", "abc"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["--help"], ["--recipe", "book", "--help"]])
def test_help_exits_0_and_names_every_option(capsys, words):
    with pytest.raises(SystemExit) as leaving:
        parse(words)
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(EffnetConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


@pytest.mark.parametrize("program", [config, text_config], ids=["effnet", "bert"])
def test_help_begins_with_the_fifteen_most_used_and_has_a_text_for_each_option(capsys, program):
    with pytest.raises(SystemExit):
        program.parse(["--help"])
    [_, first, *others] = re.split(r"^(?=[a-z].*:$)", capsys.readouterr().out.partition("\noptions:\n")[2], flags=re.M)
    assert first.startswith("most used:")
    options = re.compile(r"^  (--[a-z0-9-]+)[^\n]*(?:\n {32}[^\n]*)*", re.M)
    assert len(options.findall(first)) == 15
    assert len(others) > 5
    for one in options.finditer("".join(others) + first):
        shown = " ".join(one[0].split())
        assert "(default: " in shown
        assert not re.match(r"(\S+ ){1,2}\(default", shown)


@pytest.mark.parametrize(
    ("program", "words", "complaint"),
    [
        (config, "--epoch 3", "--epoch 3: unknown option. Did you mean --epochs? See --help."),
        (config, "--batch-size 3", "Did you mean --batch-size-per-rank or --global-batch-size?"),
        (config, "--batch_size=3", "--batch-size=3: unknown option. Did you mean --batch-size-per-rank or --global-"),
        (config, "--learning-rate 3", "Did you mean --lr?"),
        (config, "--fusion 3", "Did you mean --fusion-threshold-mb or --fusion-groups?"),
        (config, "--no-channel-last", "Did you mean --no-channels-last?"),
        (config, "--bogus --epochs 3", "--bogus: unknown option. See --help."),
        (config, "--max-seq-length 3", "--max-seq-length 3: unknown option. See --help."),
        (text_config, "--max-seq-length 3", "Did you mean --max-tokens?"),
        (text_config, "--text-colum 3", "Did you mean --text-column?"),
        (text_config, "stray", "stray: not an option or the value of one. See --help."),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(program, words, complaint):
    assert complaint in refused(lambda: program.parse(words.split()))


def test_help_is_printed_by_rank_0_alone(capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(SystemExit) as leaving:
        parse(["--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == ""


def test_settings_cannot_change_after_they_are_read():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scaled().lr = 1.0


def test_no_options_are_the_defaults():
    assert parse([]) == EffnetConfig()


def test_a_line_break_is_no_name_for_a_run():
    with pytest.raises(BadInput, match="--run"):
        parse(["--run", "a\nb"])


@pytest.mark.parametrize("recipe", ["scaled", "book"])
@pytest.mark.parametrize("given", [128, 256])
def test_two_batch_sizes_are_one_too_many(recipe, given):
    with pytest.raises(BadInput) as error:
        parse(["--recipe", recipe, "--global-batch-size", "512", f"--batch-size-per-rank={given}"])
    message = str(error.value)
    assert "\n" not in message
    assert "--global-batch-size 512" in message
    assert f"--batch-size-per-rank {given}" in message


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_layerwise_optimizers_are_refused_with_fp16(optimizer):
    with pytest.raises(BadInput) as error:
        parse(["--optimizer", optimizer, "--precision", "fp16"])
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"--optimizer {optimizer} ")
    assert "--precision fp16" in message
    assert message.endswith("use bf16 or fp32")
    for precision in ("bf16", "fp32"):
        assert parse(["--optimizer", optimizer, "--precision", precision]).optimizer == optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adam", "adamw"])
def test_other_optimizers_take_fp16(optimizer):
    assert parse(["--optimizer", optimizer, "--precision", "fp16"]).precision == "fp16"


def test_buckets_have_no_groups():
    with pytest.raises(BadInput, match=r"^--fusion-groups 4 requires --reducer horovod$"):
        parse(["--fusion-groups", "4"])
    assert parse(["--reducer", "horovod", "--fusion-groups", "4"]).fusion_groups == 4
    assert parse(["--reducer", "bucket", "--fusion-threshold-mb", "0"]).reducer == "bucket"


def test_batch_norm_over_all_ranks_is_not_compiled():
    with pytest.raises(BadInput, match=r"^--sync-bn .* --compile .*: leave one out$"):
        parse(["--sync-bn", "--compile"])
    assert parse(["--sync-bn"]).sync_bn
    assert parse(["--compile"]).compile
