"""The settings of hvdtrain.bert, and the recipes: functions that return settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hvdtrain.ranks.comm import ReplicaPart
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings import command_line, options
from hvdtrain.settings.command_line import AT_LEAST_1, PROBABILITY
from hvdtrain.settings.optimizers import OPTIMIZERS
from hvdtrain.settings.options import RunConfig

DATA = ("icd10", "json", "csv", "glue", "text")
MODELS = {  # layers, width, heads, initializer range
    "bert_tiny": (2, 128, 2, 0.06),  # learns faster than from 0.02
    "bert_mini": (4, 256, 4, 0.02),
    "bert_base": (12, 768, 12, 0.02),
    "bert_large": (24, 1024, 16, 0.02),
}
_LEAST_TOKENS = 8  # [CLS], [SEP], [SEP] and a few words
_EITHER = (("epochs", "max_steps"), ("tokenizer", "vocab_size"), ("pretrained", "vocab_size"), ("pretrained", "model"))


@dataclass(frozen=True, kw_only=True)
class BertConfig(RunConfig):
    """BERT with Horovod; recipe sets the defaults, other options change them."""

    SHAPING: ClassVar[tuple[str, ...]] = (
        *RunConfig.SHAPING,
        "task",
        "max_tokens",
        "vocab_size",
        "tokenizer",
        "freeze_embeddings",
    )
    COLUMNS: ClassVar[tuple[str, ...]] = (*RunConfig.COLUMNS, "task", "seed")
    ASIDE: ClassVar[tuple[str, ...]] = (*RunConfig.ASIDE, "export")

    MOST_USED: ClassVar[tuple[str, ...]] = (
        "recipe",
        "task",
        "data",
        "data_dir",
        "text_column",
        "label_column",
        "model",
        "pretrained",
        "max_tokens",
        "epochs",
        "global_batch_size",
        "lr",
        "precision",
        "run",
        "export",
    )
    GROUPS: ClassVar[Mapping[str, str]] = {**RunConfig.GROUPS, "task": "texts and their model"}

    recipe: str = "tiny"
    """tiny, finetune or pretrain: where the other defaults come from."""
    task: Literal["classify", "mlm"] = "classify"
    """classify learns the labels of texts, mlm to fill in masked words."""
    data: str = "icd10"
    """icd10 (diagnoses and their chapters; comes with the packages), json (lines), csv, glue or text."""
    data_dir: Path = Path("data")
    """For json, csv, glue and text the folder of train.* and test.*, validation.* or dev.*; of other files each fifth
    row is for the test."""
    text_column: str | None = None
    """text if not given; for glue by the header."""
    pair_column: str | None = None
    """That of a second text, if there is one."""
    label_column: str | None = None
    """label if not given; for glue by the header."""
    model: str = "bert_tiny"
    """bert_tiny (2 layers of 128), bert_mini (4 of 256), bert_base (12 of 768) or bert_large (24 of 1,024)."""
    experiment: Annotated[str, command_line.FOLDER_NAME] = "bert"
    """The folder below runs-dir that has the runs."""
    pretrained: str | None = None
    """A folder with config.json and weights, or a name on the Hugging Face hub; its vocabulary comes along."""
    tokenizer: Path | None = None
    """A vocab.txt, or a folder that has one; learned from the training texts if not given."""
    vocab_size: Annotated[int, AT_LEAST_1] = 4096
    """Tokens of a vocabulary that is learned, at most."""
    max_tokens: Annotated[int, AT_LEAST_1] = 128
    """Longer sequences are cut; of documents of text, into several."""
    tensor: Annotated[int, AT_LEAST_1] = 1
    """Slice each layer over this many neighbouring ranks, which have the same batches; replicas = ranks / tensor."""
    freeze_embeddings: bool = False
    """Train all but the embeddings."""
    dropout: Annotated[float | None, PROBABILITY] = None
    """Probability; the model's own if not given."""
    max_steps: Annotated[int | None, AT_LEAST_1] = None
    """End after so many steps, in place of epochs; without warmup-epochs the warm-up is the recipe's share of them."""
    export: Path | None = None
    """At the end write config.json, model.safetensors and vocab.txt into this folder, for transformers to load."""

    @property
    def parts(self) -> tuple[ReplicaPart, int]:
        return super().parts if self.tensor == 1 else ("slice", self.tensor)


def tiny() -> BertConfig:
    """From scratch on little text, on CPUs in minutes."""
    return BertConfig(
        recipe="tiny",
        epochs=5,
        global_batch_size=192,
        accumulate_steps=4,  # sequences of a step are taken by length: micro-batches with little to fill up
        optimizer="adamw",
        lr=2.8e-3,
        schedule="linear",
        warmup_epochs=0.5,
        weight_decay=0.01,
        clip_norm=1.0,
        ema_epochs=0.0,
    )


def finetune() -> BertConfig:
    """A pretrained model on labelled texts (Devlin et al. 2019: batch 32, 2e-5 to 5e-5, 3 epochs)."""
    return replace(
        tiny(),
        recipe="finetune",
        model="bert_base",
        epochs=3,
        global_batch_size=32,
        accumulate_steps=1,
        lr=8.5e-5,
        warmup_epochs=0.3,
        vocab_size=30_522,
    )


def pretrain() -> BertConfig:
    """Masked words on much text with large batches, by LAMB with the rates of You et al. 2020."""
    return replace(
        tiny(),
        recipe="pretrain",
        task="mlm",
        data="text",
        model="bert_base",
        vocab_size=30_522,
        epochs=40,
        global_batch_size=None,
        batch_size_per_rank=64,
        accumulate_steps=1,
        optimizer="lamb",
        lr=4.4e-4,
        warmup_epochs=8.0,
    )


RECIPES = {"tiny": tiny, "finetune": finetune, "pretrain": pretrain}


def parse(argv: Sequence[str]) -> BertConfig:
    """The settings of a command line; BadInput for what cannot work whatever the machine."""
    config, given = command_line.parse(argv, RECIPES, recipe="tiny", prog="python -m hvdtrain.bert")
    if config.model not in MODELS:
        raise BadInput(f"--model {config.model!r} is unknown: choose one of {', '.join(MODELS)}")
    if config.data not in DATA:
        raise BadInput(f"--data {config.data!r} is unknown: choose one of {', '.join(DATA)}")
    if "batch_size_per_rank" in given and "global_batch_size" not in given:
        config = replace(config, global_batch_size=None)  # the recipe's
    _check_parts(config)
    options.check(config, given)
    _check_texts(config, given)
    chosen = {name: f"{command_line.option(name)} {getattr(config, name)}" for name in given}
    if config.recipe == "finetune":
        chosen.setdefault("pretrained", "--recipe finetune")
    for one, other in _EITHER:
        if {one, other} <= chosen.keys():
            words = [chosen[one], chosen[other]]
            raise BadInput(f"{' and '.join(words)} exclude each other: leave one of them out")
    if "max_steps" in given and "warmup_epochs" not in given:
        config = replace(config, warmup_epochs=None)  # see of_steps
    options.require_complete(config, _check_parts, _missing(config, given))
    return replace(config, pretrained=None) if config.pretrained == "none" else config


def _check_parts(config: BertConfig) -> None:
    if config.tensor > 1 and config.stages > 1:
        raise BadInput(f"--tensor {config.tensor} does not work with --stages {config.stages}: leave one of them out")
    if config.tensor > 1 and OPTIMIZERS[config.optimizer].layerwise:
        raise BadInput(
            f"--optimizer {config.optimizer} divides by the norms of whole layers, of which --tensor {config.tensor} "
            "leaves each rank a slice: give adamw"
        )
    if config.freeze_embeddings and config.stages > 1:
        raise BadInput(f"--freeze-embeddings does not work with --stages {config.stages}: leave one of them out")


def of_steps(config: BertConfig, *, steps_per_epoch: int) -> BertConfig:
    """The settings with the epochs that --max-steps are; a warm-up that was not given is the recipe's share of them."""
    if config.max_steps is None:
        return config
    epochs, warmup_epochs, recipe = config.max_steps / steps_per_epoch, config.warmup_epochs, RECIPES[config.recipe]()
    if warmup_epochs is None:
        warmup_epochs = epochs * (recipe.warmup_epochs or 0.0) / recipe.epochs
    return replace(config, epochs=math.ceil(epochs), warmup_epochs=warmup_epochs)


def _check_texts(config: BertConfig, given: set[str]) -> None:
    """Raise BadInput where columns and task do not fit together."""
    if config.max_tokens < _LEAST_TOKENS:
        raise BadInput(f"--max-tokens {config.max_tokens} leaves no room for words: give at least {_LEAST_TOKENS}")
    if config.task == "mlm" and (columns := {"pair_column", "label_column"} & given):
        raise BadInput(f"{command_line.option(min(columns))} is for --task classify: leave it out")


def _missing(config: BertConfig, given: set[str]) -> list[str]:
    """What the settings of texts require and lack."""
    lacking = []
    if config.recipe == "finetune" and "pretrained" not in given:
        lacking.append(command_line.requires("--recipe finetune", "--pretrained FOLDER (or NAME of one of the hub)"))
    columns = [name for name in ("text_column", "pair_column", "label_column") if name in given]
    if columns and config.data in ("icd10", "text"):
        subject = " with ".join(map(command_line.option, columns))
        lacking.append(command_line.requires(subject, "--data csv (or json, or glue)"))
    elif config.task == "classify" and config.data == "text":
        lacking.append(command_line.requires("--data text", "--task mlm (it has no labels to learn)"))
    if "pair_column" in given and "text_column" not in given:
        lacking.append(command_line.requires("--pair-column", "--text-column NAME"))
    return lacking
