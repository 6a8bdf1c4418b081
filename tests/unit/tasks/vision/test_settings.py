import dataclasses
from pathlib import Path

import pytest

from hvdtrain.tasks.vision import settings as vision_settings
from hvdtrain.tasks.vision.settings import EffnetSettings, parse
from tests.refusals import refused


def test_the_scaled_recipe_is_the_default():
    assert parse([]) == parse(["--seed", "0"]) == parse(["--recipe", "scaled"]) == EffnetSettings()


@pytest.mark.parametrize("words", [["--recipe", "book"], ["--recipe=book"], ["--recipe", "scaled", "--recipe", "book"]])
def test_book_recipe(words):
    assert parse([*words, "--pretrained", "none"]) == dataclasses.replace(parse(words), pretrained=None)
    assert parse(words) == vision_settings.book()


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--data-dir some/where", {"data_dir": Path("some/where")}),
        ("--epochs 7", {"epochs": 7}),
        ("--augment=cutout:8", {"augment": "cutout:8"}),
        ("--lr 0.02 --no-scale-lr", {"lr": 0.02, "scale_lr": False}),
        ("--sync-bn", {"sync_bn": True}),
        ("--compression powersgd:2", {"compression": "powersgd:2"}),
        ("--checkpoint-every auto", {"checkpoint_every": "auto"}),
        ("--stages 0,3 --accumulate-steps 2", {"stages": "0,3", "accumulate_steps": 2}),
    ],
)  # fmt: skip
def test_an_option_sets_its_field_and_no_other(words, changed):
    assert parse(words.split()) == dataclasses.replace(EffnetSettings(), **changed)


@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_a_folder_that_would_not_be_read_is_refused(data):
    assert f"--data {data} reads no files" in refused(lambda: parse(["--data", data, "--data-dir", "some/where"]))


BAD_VALUES = """
--model resnet50, --data mnist, --recipe best, --optimizer adagrad, --schedule step, --precision fp8,
--compression zip, --reducer nccl, --epochs 1.5, --epochs 0, --batch-size-per-rank 0, --accumulate-steps 0,
--global-batch-size -64, --report-every-steps 0, --profile fast, --profile trace:0, --profile trace:all, --lr 0,
--lr nan, --lr inf, --seed 4294967296, --lr fast, --clip-value 0, --clip-norm nan, --fusion-threshold-mb inf,
--fusion-threshold-mb -1, --warmup-epochs -1, --weight-decay -3, --ema-epochs -1, --seed -1,
--augment cutout:-1, --augment cutout:0, --augment cutout, --augment all,
--dropout 1, --stochastic-depth -0.5, --label-smoothing 1, --run ../x, --run .., --run a/b/c
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
