"""The settings of hvdtrain.bert, and the recipes: functions that return settings."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hvdtrain.parallel.tensor.settings import TensorSettings
from hvdtrain.program import settings as program
from hvdtrain.program.settings import Settings
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.command_line import option
from hvdtrain.settings.group import Missing, requires
from hvdtrain.settings.notes import AT_LEAST_1, COLUMN, NEUTRAL, PROBABILITY, SHAPES, Rule, one_of
from hvdtrain.settings.safety.exits import BadInput

DATA = ("icd10", "json", "csv", "glue", "text")
MODELS = {  # layers, width, heads, initializer range
    "bert_tiny": (2, 128, 2, 0.06),  # learns faster than with 0.02
    "bert_mini": (4, 256, 4, 0.02),
    "bert_base": (12, 768, 12, 0.02),
    "bert_large": (24, 1024, 16, 0.02),
}
# On the Hugging Face hub, with the sizes of their vocabularies.
_OF_HUB = {
    f"{owner}bert-{size}-{case}": (f"bert_{size}", words)
    for owner in ("", "google-bert/")
    for size in ("base", "large")
    for case, words in (("uncased", 30_522), ("cased", 28_996))
}
_LEAST_TOKENS = 8  # [CLS], [SEP], [SEP] and a few words
_EITHER = (("epochs", "max_steps"), ("tokenizer", "vocab_size"), ("pretrained", "vocab_size"), ("pretrained", "model"))


def split_columns(columns: str) -> list[str]:
    """Return the names, separated by commas; a name that has one is in quotes."""
    rows = list(csv.reader(columns.splitlines(keepends=True), skipinitialspace=True))
    return rows[0] if len(rows) == 1 else []


COLUMN_NAMES = Rule(
    holds=lambda value: len(names := split_columns(value)) in (1, 2, 3) and all(names),
    text="must be TEXT, TEXT,LABEL or TEXT,PAIR,LABEL. Write a name that has a comma in quotes",
)


@dataclass(frozen=True, kw_only=True)
class BertSettings(TensorSettings, Settings):
    """BERT with Horovod; recipe sets the defaults, other options change them."""

    title: ClassVar[str] = "texts and their model"
    MOST_USED: ClassVar[tuple[str, ...]] = (
        *("recipe", "task", "data", "data_dir", "columns", "model", "pretrained", "max_tokens"),
        *("epochs", "global_batch_size", "batch_size_per_rank", "lr", "precision", "run", "export"),
    )

    recipe: str = "tiny"
    """tiny, finetune or pretrain: source of the other defaults."""
    task: Annotated[Literal["classify", "mlm"], SHAPES, COLUMN] = "classify"
    """classify learns the labels of texts, mlm learns to fill in masked words."""
    data: Annotated[str, one_of(DATA)] = "icd10"
    """icd10 (diagnoses and their chapters; included in the packages), json (lines), csv, glue or text."""
    data_dir: Path = Path("data")
    """For json, csv, glue and text: folder with files for training and for the test by name, such as train.csv and
    dev.csv; in other files every fifth row of a label is for the test.
    """
    columns: Annotated[str | None, COLUMN_NAMES] = None
    """Names of the columns: TEXT, TEXT,LABEL or TEXT,PAIR,LABEL, with a second text as PAIR; a name that has a comma in
    quotes. If not given: text,label, or by the header for glue.
    """
    model: Annotated[str, one_of(MODELS)] = "bert_tiny"
    """bert_tiny (2 layers of 128), bert_mini (4 of 256), bert_base (12 of 768) or bert_large (24 of 1,024)."""
    experiment: str = "bert"
    pretrained: str | None = None
    """Folder with config.json and weights, or a name on the Hugging Face hub; includes its vocabulary."""
    tokenizer: Annotated[Path | None, SHAPES] = None
    """A vocab.txt or tokenizer.json, or a folder with one; learned from the training texts if not given."""
    vocab_size: Annotated[int, AT_LEAST_1, SHAPES] = 4096
    """Maximum size of a learned vocabulary, in tokens."""
    max_tokens: Annotated[int, AT_LEAST_1, SHAPES] = 128
    """Longer sequences are truncated; documents of text are split into several."""
    freeze_embeddings: Annotated[bool, SHAPES] = False
    """Train everything except the embeddings."""
    dropout: Annotated[float | None, PROBABILITY] = None
    """Probability; the model's default if not given."""
    max_steps: Annotated[int | None, AT_LEAST_1] = None
    """End after this number of steps, instead of epochs; without warmup-epochs the warm-up is the recipe's share of the
    steps.
    """
    export: Annotated[Path | None, NEUTRAL] = None
    """At the end write config.json, model.safetensors and vocab.txt into this folder, for transformers to load."""

    @property
    def parts(self) -> tuple[str, int]:
        return super().parts if self.tensor == 1 else ("--tensor", self.tensor)

    def check(self, given: set[str]) -> None:
        if self.max_tokens < _LEAST_TOKENS:
            raise BadInput(f"--max-tokens {self.max_tokens}: leaves no room for words. Pass at least {_LEAST_TOKENS}.")
        if self.task == "mlm" and len(split_columns(self.columns or "")) > 1:
            raise BadInput(f"--columns {self.columns}: --task mlm reads one column. Leave out the others.")
        if self.data == "icd10" and "data_dir" in given:
            raise BadInput(
                f"--data-dir {self.data_dir}: --data icd10 reads no files. Pass --data csv, json, glue or text."
            )
        options = {name: f"{option(name)} {getattr(self, name)}" for name in given}
        if self.pretrained == "none":
            options.pop("pretrained", None)
        elif self.recipe == "finetune":
            options.setdefault("pretrained", "--recipe finetune")
        for first, second in _EITHER:
            if {first, second} <= options.keys():
                raise BadInput(f"{options[first]} and {options[second]} exclude each other. Use only one.")

    def missing(self) -> Missing:
        lines = []
        if self.recipe == "finetune" and self.pretrained is None:
            lines.append(requires("--recipe finetune", "--pretrained FOLDER (or the NAME of a model on the hub)"))
        if self.columns is not None and self.data in ("icd10", "text"):
            lines.append(requires("--columns", "--data csv (or json, or glue)"))
        elif self.task == "classify" and self.data == "text":
            lines.append(requires("--data text", "--task mlm (it has no labels to learn)"))
        return {line: {} for line in lines}

    def uses(self) -> Iterable[Use]:
        if self.freeze_embeddings:
            yield Use(option="--freeze-embeddings", takes=(Capability.TRAINED,))


def tiny() -> BertSettings:
    """Training from scratch on little text, on CPUs in minutes."""
    return BertSettings(
        recipe="tiny",
        epochs=5,
        global_batch_size=192,
        accumulate_steps=4,  # sequences of a step are sorted by length: micro-batches need little padding
        optimizer="adamw",
        lr=2.8e-3,
        schedule="linear",
        warmup_epochs=0.5,
        weight_decay=0.01,
        clip_norm=1.0,
        ema_epochs=0.0,
    )


def finetune() -> BertSettings:
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


def pretrain() -> BertSettings:
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


def parse(argv: Sequence[str]) -> BertSettings:
    """Parse a command line; BadInput for values that cannot work on any machine."""
    return program.parse(argv, RECIPES.values(), resolve)


def resolve(settings: BertSettings, given: set[str]) -> BertSettings:
    """Derive further settings from the fields that were given."""
    if "max_steps" in given and "warmup_epochs" not in given:
        settings = replace(settings, warmup_epochs=None)  # see of_steps
    settings = replace(settings, pretrained=None) if settings.pretrained == "none" else settings
    return without_download(settings) if settings.dry_run else settings


def without_download(settings: BertSettings) -> BertSettings:
    """Replace a model of the hub by one of equal sizes; BadInput if its sizes are unknown."""
    source = settings.pretrained
    if source is None or Path(source).is_dir():
        return settings
    if source not in _OF_HUB:
        raise BadInput(
            f"--pretrained {source}: --dry-run downloads nothing. Pass a folder, or --pretrained none with --model and "
            "--vocab-size."
        )
    model, words = _OF_HUB[source]
    return replace(settings, pretrained=None, model=model, vocab_size=words)


def of_steps(settings: BertSettings, *, steps_per_epoch: int) -> BertSettings:
    """Convert --max-steps to epochs; a warm-up that was not given is the recipe's share of them."""
    if settings.max_steps is None:
        return settings
    epochs = settings.max_steps / steps_per_epoch
    warmup_epochs, recipe = settings.warmup_epochs, RECIPES[settings.recipe]()
    if warmup_epochs is None:
        warmup_epochs = epochs * (recipe.warmup_epochs or 0.0) / recipe.epochs
    return replace(settings, epochs=math.ceil(epochs), warmup_epochs=warmup_epochs)
