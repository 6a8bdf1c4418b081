"""The texts of a run before tokenization, by the name of the data: can be read repeatedly, row by row."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from hvdtrain.feed.split_names import (
    Role,
    ambiguous,
    choose_splits,
    ends_with_split,
    quoted,
    split_name,
    splits_among,
)
from hvdtrain.feed.unused_files import is_junk, is_read_elsewhere, note_unused, usage_line
from hvdtrain.safety.exits import BadInput
from hvdtrain.text import formats, icd10
from hvdtrain.text.formats import Columns, Row
from hvdtrain.text.settings import BertSettings

_ORDER: tuple[Role, ...] = ("test", "validation")
_GLUE_ORDER: tuple[Role, ...] = ("validation", "test")  # GLUE's own test has no labels
_MRPC = ("msr_paraphrase_train", "msr_paraphrase_test")  # of which GLUE's scripts make train, dev and test
_SUFFIXES = {"json": (".jsonl", ".json"), "csv": (".csv", ".tsv"), "glue": (".tsv", ".txt"), "text": (".txt",)}
_TEST_SHARE = 5  # without separate files for training and testing: every fifth row is for the test


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows for training and testing."""

    train: Callable[[], Iterator[Row]]
    test: Callable[[], Iterator[Row]]
    key: Callable[[], str]  # returns the SHA-256 of the current sources of the rows
    usage: str = ""  # which files are for training and which for testing, in a line


def make_corpus(config: BertSettings) -> Corpus:
    """Return the texts of a run's data; BadInput if there are none."""
    if config.data == "icd10":
        return Corpus(train=icd10.train, test=icd10.test, key=icd10.key)
    train, test, usage = _find_files(config.data, config.data_dir)
    reader = partial(_read_rows, config.data, _choose_columns(config), config.task == "classify")
    key = partial(_hash_files, repr((config.data, _choose_columns(config), len(train), len(test))), (*train, *test))
    if test:
        of_test = partial(_read_all, reader, test)
        return Corpus(train=partial(_read_all, reader, train), test=of_test, key=key, usage=usage)
    return Corpus(
        train=lambda: (row for number, row in enumerate(_read_all(reader, train), start=1) if number % _TEST_SHARE),
        test=lambda: (row for number, row in enumerate(_read_all(reader, train), start=1) if not number % _TEST_SHARE),
        key=key,
        usage=usage,
    )


def _hash_files(settings: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(settings.encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _find_files(data: str, folder: Path) -> tuple[list[Path], list[Path], str]:
    """Return the files for training and for testing, and a line on them; without such names all are for training."""
    if not folder.is_dir():
        raise BadInput(f"--data-dir {folder}: no such folder. Pass the folder that has the files of --data {data}.")
    unused = Counter[str]()
    files = _list_files(_SUFFIXES[data], folder, unused)
    if not files:
        raise BadInput(
            f"--data-dir {folder}: no file of --data {data} ({', '.join(_SUFFIXES[data])}). Pass the folder that has "
            "them."
        )
    if data == "glue" and "train" in files:
        unused["of MSR"] += sum(len(files.pop(name, ())) for name in _MRPC)
    train, test = _choose_files(files, folder, _GLUE_ORDER if data == "glue" else _ORDER)
    if empty := [path for path in (*train, *test) if not path.stat().st_size]:
        raise BadInput(f"{empty[0]}: empty file. Fill it, or remove it.")
    for name, paths in files.items():
        if paths[0] not in (*train, *test):
            unused[f"of {'another' if split_name(name) else 'no'} split ({name})"] += len(paths)
    train_names, test_names = (quoted([str(path.relative_to(folder)) for path in paths]) for paths in (train, test))
    shown = test_names or "each fifth row of it"
    return train, test, usage_line(folder, train_names, shown, used=len(train) + len(test), unused=unused)


def _list_files(suffixes: Sequence[str], folder: Path, unused: Counter[str]) -> dict[str, list[Path]]:
    """Return the files of these kinds by name, or by the name of a split's folder, and count the others.

    A folder that only has a folder stands for it.
    """
    entries = sorted(folder.iterdir())
    visible = [path for path in entries if not is_junk(path.name)]
    folders = [path for path in visible if path.is_dir() and not is_read_elsewhere(path)]
    files = [path for path in visible if path.suffix.lower() in suffixes and path.is_file()]
    by_name: dict[str, list[Path]] = {}
    if len(visible) == len(folders) == 1:
        by_name = _list_files(suffixes, folders[0], unused)
    elif not files and splits_among([path.name for path in folders], ends_with_split):
        for path in folders:
            if found := sorted(chain.from_iterable(_list_files(suffixes, path, unused).values())):
                by_name[path.name] = found
    else:
        folders = []
    for path in files:
        if path.stem in by_name:
            raise BadInput(f"{path}: {by_name[path.stem][0].name} has the same name. Remove one of them.")
        by_name[path.stem] = [path]
    note_unused(folder, [path.name for path in entries if path not in (*files, *folders)], unused)
    return by_name


def _choose_files(
    files: Mapping[str, list[Path]], folder: Path, prefer: Sequence[Role]
) -> tuple[list[Path], list[Path]]:
    if not splits_among(files, ends_with_split):
        return list(chain.from_iterable(files.values())), []
    names = splits_among(files, lambda _: True)
    others = sorted(files.keys() - set(names))
    chosen = choose_splits(names, others, folder, "file", prefer=prefer)
    if not chosen.tests and others:
        raise ambiguous(
            folder,
            f"{quoted(chosen.train)} is all of the data, and each fifth row is for the test",
            f"{quoted(others)} belongs to the data too",
            "Call the file for the test test, or move away what is not to be used",
        )
    train, test = (
        [path for name in part for path in files[name]]
        for part in (chosen.train, chosen.tests[0] if chosen.tests else ())
    )
    return train, test


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
