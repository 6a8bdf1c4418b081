"""The texts of a run by the name of their data, before they are numbers: read as often as asked, row by row."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from hvdtrain.safety.exits import BadInput
from hvdtrain.text import formats, icd10
from hvdtrain.text.config import BertConfig
from hvdtrain.text.formats import Columns, Row

TEST_NAMES = ("test", "validation", "valid", "dev")
_GLUE_TEST_NAMES = ("dev", "dev_matched", "validation", "msr_paraphrase_test", "test")  # GLUE's own test has no labels
_TRAIN_NAMES = ("train", "msr_paraphrase_train")
_SUFFIXES = {"json": (".jsonl", ".json"), "csv": (".csv", ".tsv"), "glue": (".tsv", ".txt"), "text": (".txt",)}
_TEST_SHARE = 5  # where there is one file, or are files without such names: each fifth row is for the test


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows to train on and to test with."""

    train: Callable[[], Iterator[Row]]
    test: Callable[[], Iterator[Row]]
    key: Callable[[], str]  # SHA-256 of all that the rows come from, as it is at that moment


def corpus_of(config: BertConfig) -> Corpus:
    """The texts of a run's data; BadInput where there are none."""
    if config.data == "icd10":
        return Corpus(train=icd10.train, test=icd10.test, key=icd10.key)
    train, test = _files(config.data, config.data_dir)
    reader = partial(_rows, config.data, _columns(config), config.task == "classify")
    key = partial(_key, repr((config.data, _columns(config), len(train), len(test))), (*train, *test))
    if test:
        return Corpus(train=partial(_all, reader, train), test=partial(_all, reader, test), key=key)
    return Corpus(
        train=lambda: (row for number, row in enumerate(_all(reader, train), start=1) if number % _TEST_SHARE),
        test=lambda: (row for number, row in enumerate(_all(reader, train), start=1) if not number % _TEST_SHARE),
        key=key,
    )


def _key(settings: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(settings.encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(data: str, folder: Path) -> tuple[list[Path], list[Path]]:
    """Those to train on and to test with; without a pair of such names all of them, and none."""
    if not folder.is_dir():
        raise BadInput(f"--data-dir {folder}: no such folder; give the one that has the files of --data {data}")
    found = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES[data] and path.is_file())
    if not found:
        raise BadInput(f"--data-dir {folder}: has no file of --data {data} ({', '.join(_SUFFIXES[data])})")
    empty = [path for path in found if not path.stat().st_size]
    if empty:
        raise BadInput(f"{empty[0]} is empty: fill it, or take it away")
    by_name = {path.stem: path for path in reversed(found)}
    if len(by_name) < len(found):
        twice = next(path for path in found if path != by_name[path.stem])
        raise BadInput(f"{twice} and {by_name[twice.stem].name} have one name: take one of them away")
    train = [by_name[name] for name in _TRAIN_NAMES if name in by_name]
    test = [by_name[name] for name in (_GLUE_TEST_NAMES if data == "glue" else TEST_NAMES) if name in by_name]
    if train and test:
        known = (*_TRAIN_NAMES, *_GLUE_TEST_NAMES, *TEST_NAMES)
        named = ("train",) if data == "glue" else ("train", "test")  # MNLI has tests without labels
        more = [path for path in found if path.stem not in known and path.stem.startswith(named)]
        if more:
            raise BadInput(
                f"{more[0]} would not be read beside {train[0].name} and {test[0].name}: move its rows into one, "
                "or take it away"
            )
        return train[:1], test[:1]
    if test or (train and len(found) > 1):
        names = ", ".join(path.name for path in found)
        raise BadInput(
            f"--data-dir {folder} has {names}: give one train{found[0].suffix} and one test{found[0].suffix}, or files "
            "without such names alone"
        )
    return found, []


def _columns(config: BertConfig) -> Columns:
    label = config.label_column or "label" if config.task == "classify" else None
    if config.data == "glue" and config.text_column is None:
        return Columns(text=None, pair=None, label=config.label_column)
    return Columns(text=config.text_column or "text", pair=config.pair_column, label=label)


def _rows(data: str, columns: Columns, labelled: bool, path: Path) -> Iterator[Row]:
    if data == "json":
        return formats.json_lines(path, columns)
    if data == "text":
        return formats.documents(path)
    return formats.table(path, columns, quoted=data == "csv", labelled=labelled)


def _all(reader: Callable[[Path], Iterator[Row]], paths: Iterable[Path]) -> Iterator[Row]:
    return chain.from_iterable(map(reader, paths))
