"""The texts of a run before tokenization, by the name of the data: can be read repeatedly, row by row."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from hvdtrain.safety.exits import BadInput
from hvdtrain.text import formats, icd10
from hvdtrain.text.formats import Columns, Row
from hvdtrain.text.settings import BertSettings

TEST_NAMES = ("test", "validation", "valid", "dev")
_GLUE_TEST_NAMES = ("dev", "dev_matched", "validation", "msr_paraphrase_test", "test")  # GLUE's own test has no labels
_TRAIN_NAMES = ("train", "msr_paraphrase_train")
_SUFFIXES = {"json": (".jsonl", ".json"), "csv": (".csv", ".tsv"), "glue": (".tsv", ".txt"), "text": (".txt",)}
_NO_LABEL = (None, "-1", "-1.0")  # of all rows of a published test
_TEST_SHARE = 5  # without separate files for training and testing: every fifth row is for the test


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows for training and testing."""

    train: Callable[[], Iterator[Row]]
    test: Callable[[], Iterator[Row]]
    key: Callable[[], str]  # returns the SHA-256 of the current sources of the rows
    remarks: tuple[str, ...] = ()  # for the user, on the choice of these rows


def make_corpus(config: BertSettings) -> Corpus:
    """Return the texts of a run's data; BadInput if there are none."""
    if config.data == "icd10":
        return Corpus(train=icd10.train, test=icd10.test, key=icd10.key)
    train, tests = _find_files(config.data, config.data_dir)
    columns, labelled = _choose_columns(config), config.task == "classify"
    reader = partial(_read_rows, config.data, columns, labelled)
    test, remarks = _choose_test(config.data, columns, tests) if labelled else (tests[:1], ())
    if tests and not test:
        next(_read_all(reader, train), None)  # a column that the training texts lack, too, is another error
        names = ", ".join(map(str, tests))
        raise BadInput(
            f"{names}: no labels, or all of them -1. Add labels, or remove the file: without a test, every fifth "
            "training row is for the test."
        )
    settings = repr((config.data, columns, len(train), len(test), remarks))
    key = partial(_hash_files, settings, (*train, *test))
    if test:
        read_train, read_test = partial(_read_all, reader, train), partial(_read_all, reader, test)
        return Corpus(train=read_train, test=read_test, key=key, remarks=remarks)
    return Corpus(
        train=lambda: (row for number, row in enumerate(_read_all(reader, train), start=1) if number % _TEST_SHARE),
        test=lambda: (row for number, row in enumerate(_read_all(reader, train), start=1) if not number % _TEST_SHARE),
        key=key,
    )


def _choose_test(data: str, columns: Columns, files: list[Path]) -> tuple[list[Path], tuple[str, ...]]:
    """Return the first file with a label, if there is one, and a remark on those before it.

    Tests are published without labels: all of them -1, or empty, or without the column.
    """
    optional = replace(columns, require_label=False)
    for number, path in enumerate(files):
        if any(row.label not in _NO_LABEL for row in _read_rows(data, optional, True, path)):
            names = ", ".join(unlabelled.name for unlabelled in files[:number])
            return [path], (f"{names}: no labels, or all of them -1; {path.name} is the test",) if names else ()
    return [], ()


def _hash_files(settings: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(settings.encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _find_files(data: str, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files for training, and those for testing, the first one first.

    Without a pair of such names, all files are for training.
    """
    if not folder.is_dir():
        raise BadInput(f"--data-dir {folder}: no such folder. Pass the folder that has the files of --data {data}.")
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES[data] and path.is_file())
    if not files:
        raise BadInput(
            f"--data-dir {folder}: no file of --data {data} ({', '.join(_SUFFIXES[data])}). Pass the folder that has "
            "them."
        )
    empty = [path for path in files if not path.stat().st_size]
    if empty:
        raise BadInput(f"{empty[0]}: empty file. Fill it, or remove it.")
    by_name = {path.stem: path for path in reversed(files)}
    if len(by_name) < len(files):
        repeated = next(path for path in files if path != by_name[path.stem])
        raise BadInput(f"{repeated}: {by_name[repeated.stem].name} has the same name. Remove one of them.")
    train = [by_name[name] for name in _TRAIN_NAMES if name in by_name]
    test = [by_name[name] for name in (_GLUE_TEST_NAMES if data == "glue" else TEST_NAMES) if name in by_name]
    if train and test:
        known_names = (*_TRAIN_NAMES, *_GLUE_TEST_NAMES, *TEST_NAMES)
        prefixes = ("train",) if data == "glue" else ("train", "test")  # MNLI has tests without labels
        unread = [path for path in files if path.stem not in known_names and path.stem.startswith(prefixes)]
        if unread:
            raise BadInput(
                f"{unread[0]}: would be ignored, since only {train[0].name} and {test[0].name} are read. Merge or "
                "remove it."
            )
        return train[:1], test
    if test or (train and len(files) > 1):
        names = ", ".join(path.name for path in files)
        raise BadInput(
            f"--data-dir {folder}: has {names}. Keep one train{files[0].suffix} and one test{files[0].suffix}, or "
            "only files with other names."
        )
    return files, []


def _choose_columns(config: BertSettings) -> Columns:
    label = config.label_column or "label" if config.task == "classify" else None
    if config.data == "glue" and config.text_column is None:
        return Columns(text=None, pair=None, label=config.label_column)
    return Columns(text=config.text_column or "text", pair=config.pair_column, label=label)


def _read_rows(data: str, columns: Columns, labelled: bool, path: Path) -> Iterator[Row]:
    if data == "json":
        return formats.read_json_lines(path, columns)
    if data == "text":
        return formats.read_documents(path)
    return formats.read_table(path, columns, quoted=data == "csv", labelled=labelled)


def _read_all(reader: Callable[[Path], Iterator[Row]], paths: Iterable[Path]) -> Iterator[Row]:
    return chain.from_iterable(map(reader, paths))
