import dataclasses
from pathlib import Path

import pytest

from hvdtrain.settings.notes import chosen
from hvdtrain.vision import settings as vision_settings
from hvdtrain.vision.settings import EffnetSettings, parse
from tests.refusals import refused

OPTIONS = [
    ("--data digits", "digits"),
    ("--data-dir some/where", Path("some/where")),
    ("--model efficientnet_tiny", "efficientnet_tiny"),
    ("--pretrained hub", "hub"),
    ("--dropout 0.0", 0.0),
    ("--stochastic-depth 0.4", 0.4),
    ("--recipe scaled", "scaled"),
    ("--epochs 7", 7),
    ("--batch-size-per-rank 12", 12),
    ("--global-batch-size 96", 96),
    ("--accumulate-steps 3", 3),
    ("--recompute", True),
    ("--stages 2 --accumulate-steps 2", 2),
    ("--stages-at 3 --stages 2 --accumulate-steps 2", "3"),
    ("--optimizer adamw", "adamw"),
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
    ("--report-every-steps 5", 5),
    ("--find-nan", True),
    ("--on-spike skip", "skip"),
    ("--no-tf32", False),
    ("--clip-value 0.5", 0.5),
    ("--clip-norm 1", 1.0),
    ("--precision bf16", "bf16"),
    ("--compile", True),
    ("--compression powersgd:2", "powersgd:2"),
    ("--sync two-level", "two-level"),
    ("--sync-every 16@5 --sync local", "16@5"),
    ("--sync-group-size 4 --sync two-level", 4),
    ("--reducer horovod", "horovod"),
    ("--elastic", True),
    ("--grow --elastic", True),
    ("--min-np 2 --elastic", 2),
    ("--fusion-threshold-mb 0", 0.0),
    ("--profile exact", "exact"),
    ("--timeline", True),
    ("--dry-run", True),
    ("--remedies", True),
    ("--device h200 --dry-run", "h200"),
    ("--json --dry-run", True),
    ("--seed 11", 11),
    ("--runs-dir else/where", Path("else/where")),
    ("--experiment mine", "mine"),
    ("--run first", "first"),
    ("--overwrite", True),
    ("--deterministic", True),
    ("--checkpoint-every-s 7.5", 7.5),
    ("--failures-per-gpu-hour 0.1 --checkpoint-every-s auto", 0.1),
    ("--checkpoint-every-steps 12", 12),
    ("--keep 5", 5),
]


def test_the_scaled_recipe_is_the_default():
    assert parse([]) == parse(["--seed", "0"]) == parse(["--recipe", "scaled"]) == EffnetSettings()


@pytest.mark.parametrize("words", [["--recipe", "book"], ["--recipe=book"], ["--recipe", "scaled", "--recipe", "book"]])
def test_book_recipe(words):
    assert parse([*words, "--pretrained", "none"]) == dataclasses.replace(parse(words), pretrained=None)
    assert parse(words) == EffnetSettings(
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


WITH_IT = {  # what an option does not stand without
    "device": {"dry_run": True},
    "failures_per_gpu_hour": {"checkpoint_every_s": "auto"},
    "json": {"dry_run": True},
    "grow": {"elastic": True},
    "min_np": {"elastic": True},
    "stages": {"accumulate_steps": 2},
    "sync_every": {"sync": "local"},
    "sync_group_size": {"sync": "two-level"},
    "stages_at": {"stages": 2, "accumulate_steps": 2},
}


def test_each_option_sets_its_field_and_no_other():
    for words, expected in OPTIONS:
        field = words.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        wanted = dataclasses.replace(EffnetSettings(), **{field: expected, **WITH_IT.get(field, {})})
        assert parse(words.split()) == wanted, words


def test_the_list_above_knows_every_option():
    words = {words.split()[0].removeprefix("--").removeprefix("no-") for words, _ in OPTIONS}
    fields = {field.name for field in dataclasses.fields(EffnetSettings)} - chosen(EffnetSettings).keys()
    assert words == {name.replace("_", "-") for name in fields}


BAD_VALUES = """
--model resnet50, --data mnist, --recipe best, --optimizer adagrad, --schedule step, --precision fp8,
--compression zip, --reducer nccl, --epochs 1.5, --epochs 0, --batch-size-per-rank 0, --accumulate-steps 0,
--global-batch-size -64, --report-every-steps 0, --profile fast, --profile trace:0, --profile trace:all, --lr 0,
--lr nan, --lr inf, --seed 4294967296, --lr fast, --clip-value 0, --clip-norm nan, --fusion-threshold-mb inf,
--fusion-threshold-mb -1, --warmup-epochs -1, --weight-decay -3, --ema-epochs -1, --cutout -1, --seed -1,
--dropout 1, --stochastic-depth -0.5, --label-smoothing 1, --run ../x, --run .., --experiment a/b
"""


def test_a_bad_value_is_one_line_that_names_option_and_value():
    for words in BAD_VALUES.replace("\n", " ").split(", "):
        option, value = words.split()
        message = refused(lambda given=(option, value): parse(given))
        assert option in message, words
        assert value in message.replace(option, ""), words


@pytest.mark.parametrize(("images", "most"), [(100, 100), (4_040, 101), (1_281_167, 32_029)])
def test_a_thousandth_of_the_images_that_are_read_may_be_unreadable(images, most):
    assert vision_settings.unreadable_limit(EffnetSettings(epochs=25), images) == most
    assert vision_settings.unreadable_limit(EffnetSettings(max_unreadable_images=0), images) == 0
