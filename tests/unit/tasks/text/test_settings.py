from dataclasses import replace

import pytest

from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.text.settings import of_steps, parse
from tests.refusals import refused, require_facts


def test_a_batch_per_rank_takes_the_place_of_the_recipes_global_batch():
    assert parse([]).global_batch_size == 192
    given = parse(["--batch-size-per-rank", "8"])
    assert (given.global_batch_size, given.batch_size_per_rank) == (None, 8)


@pytest.mark.parametrize("name", texts.RECIPES)
def test_a_recipe_is_its_own_default(name):
    assert parse(["--recipe", name, "--pretrained", "none"]) == replace(texts.RECIPES[name]())


@pytest.mark.parametrize(
    ("words", "epochs", "warmup_epochs"),
    [
        ("--max-steps 25", 3, 0.25),  # a tenth of the recipe's 5 epochs
        ("--max-steps 25 --warmup-epochs 1.5", 3, 1.5),
        ("--max-steps 25 --warmup-epochs 0.5", 3, 0.5),  # the recipe's own number, but asked for
        ("--max-steps 20 --recipe pretrain --data-dir d", 2, 0.4),  # 8 of 40 epochs
    ],
)
def test_with_max_steps_the_warm_up_is_the_recipes_share_of_them(words, epochs, warmup_epochs):
    config = of_steps(parse(words.split()), steps_per_epoch=10)
    assert (config.epochs, config.warmup_epochs) == (epochs, pytest.approx(warmup_epochs))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data text", "--data text requires --task mlm"),
        ("--columns t", "--columns requires --data csv (or json, or glue)"),
        ("--data csv --columns a,,c", "--columns a,,c: must be TEXT, TEXT,LABEL or TEXT,PAIR,LABEL"),
        ("--data csv --columns a,b,c,d", "--columns a,b,c,d: must be"),
        ("--data csv --columns=", "--columns '': must be"),
        ("--data csv --task mlm --columns a,b", "--columns a,b: --task mlm reads one column"),
        ("--epochs 3 --max-steps 5", "--epochs 3 and --max-steps 5 exclude each other"),
        ("--tokenizer v --vocab-size 9", "--tokenizer v and --vocab-size 9 exclude each other"),
        ("--pretrained p --model bert_base", "--pretrained p and --model bert_base exclude each other"),
        ("--data-dir texts", "--data-dir texts: --data icd10 reads no files. Pass --data csv"),
    ],
)
def test_what_cannot_go_together_is_refused(words, named):
    require_facts(refused(lambda: parse(words.split())), named)


def test_a_model_from_scratch_takes_the_place_of_a_pretrained_one():
    words = "--recipe finetune --pretrained none --model bert_mini --vocab-size 999 --dry-run a100"
    assert parse(words.split()).model == "bert_mini"
