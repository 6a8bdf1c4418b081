from dataclasses import dataclass
from typing import Annotated

from hvdtrain.settings.notes import AT_LEAST_1, COLUMN, NEUTRAL, SHAPES, Column, columns, marked, notes
from hvdtrain.tasks.text.settings import BertSettings
from hvdtrain.tasks.vision.settings import EffnetSettings


@dataclass(frozen=True, kw_only=True)
class Base:
    width: Annotated[int, AT_LEAST_1, SHAPES] = 2
    run: Annotated[str, NEUTRAL, COLUMN] = "a"


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    width: int = 4
    rate: Annotated[float, Column(value="peak", first=True)] = 0.5


def test_a_field_that_is_declared_again_keeps_its_notes():
    assert notes(Derived)["width"] == [AT_LEAST_1, SHAPES]
    assert (marked(Derived, SHAPES), marked(Derived, NEUTRAL)) == (("width",), ("run",))


def test_columns_that_are_shown_from_the_beginning_stand_first():
    assert columns(Base) == ("run",)
    assert columns(Derived) == ("peak", "run")


def test_what_a_checkpoint_depends_on():
    common = {"data", "model", "optimizer", "decay_all", "seed"}
    assert set(marked(EffnetSettings, SHAPES)) == common | {"stem_stride"}
    of_texts = {"task", "max_tokens", "vocab_size", "tokenizer", "freeze_embeddings"}
    assert set(marked(BertSettings, SHAPES)) == common | of_texts
