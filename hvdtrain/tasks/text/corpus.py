"""The texts of a run before tokenization, by the name of the data: can be read repeatedly, row by row."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from hvdtrain.loop.feed.split_names import (
    Role,
    ambiguous,
    choose_splits,
    ends_with_split,
    is_junk,
    is_read_elsewhere,
    note_unused,
    quoted,
    require_target,
    split_name,
    splits_among,
    usage_line,
)
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text import formats, icd10
from hvdtrain.tasks.text.formats import Columns, Row
from hvdtrain.tasks.text.settings import BertSettings, split_columns

_ORDER: tuple[Role, ...] = ("test", "validation")
_GLUE_ORDER: tuple[Role, ...] = ("validation", "test")  # GLUE's own test has no labels
_MRPC = ("msr_paraphrase_train", "msr_paraphrase_test")  # of which GLUE's scripts make train, dev and test
_SUFFIXES = {"json": (".jsonl", ".json"), "csv": (".csv", ".tsv"), "glue": (".tsv", ".txt"), "text": (".txt",)}
_NO_LABEL = (None, "-1", "-1.0")  # of all rows of a published test
_TEST_SHARE = 5  # without separate files for training and testing: every fifth row of a label is for the test


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows for training and testing."""

    train: Callable[[], Iterator[Row]]
    test: Callable[[], Iterator[Row]]
    key: Callable[[], str]  # returns the SHA-256 of the current sources of the rows
    remarks: tuple[str, ...] = ()  # for the user, on the choice of these rows
    usage: str = ""  # which files are for training and which for testing, in a line


@dataclass(frozen=True, kw_only=True)
class _Files:
    """The files of a folder: for training, for testing in the order of preference, and the rest."""

    train: list[Path]
    tests: list[list[Path]]  # the files of each split that could be the test
    others: dict[str, list[Path]]  # by name
    unused: Counter[str]  # by reason


def make_corpus(config: BertSettings) -> Corpus:
    """Return the texts of a run's data; BadInput if there are none."""
    if config.data == "icd10":
        return Corpus(train=icd10.train, test=icd10.test, key=icd10.key)
    files = _find_files(config.data, config.data_dir)
    train, columns, labelled = files.train, _choose_columns(config), config.task == "classify"
    reader = partial(_read_rows, config.data, columns, labelled)
    test, remarks = _choose_test(config.data, columns, files.tests) if labelled else (files.tests[:1], ())
    if files.tests and not test:
        next(_read_all(reader, train), None)  # a column that the training texts lack, too, is another error
        names = ", ".join(map(str, chain.from_iterable(files.tests)))
        raise BadInput(
            f"{names}: no labels, or all of them -1. Add labels, or remove the file: without a test, every fifth "
            "training row is for the test."
        )
    test_files = [path for split in test for path in split]
    settings = repr((config.data, columns, len(train), len(test_files), remarks))
    key = partial(_hash_files, settings, (*train, *test_files))
    usage = _usage_of(config.data_dir, files, test_files)
    if test_files:
        read_train, read_test = partial(_read_all, reader, train), partial(_read_all, reader, test_files)
        return Corpus(train=read_train, test=read_test, key=key, remarks=remarks, usage=usage)
    return Corpus(
        train=lambda: _fifths(_read_all(reader, train), is_test=False),
        test=lambda: _fifths(_read_all(reader, train), is_test=True),
        key=key,
        usage=usage,
    )


def _fifths(rows: Iterable[Row], *, is_test: bool) -> Iterator[Row]:
    """Yield each fifth row of a label for the test, or the others: labels may come in turn, and some are rare."""
    counts = Counter[str | None]()
    for row in rows:
        counts[row.label] += 1
        if (counts[row.label] % _TEST_SHARE == 0) is is_test:
            yield row


def _choose_test(data: str, columns: Columns, splits: Sequence[list[Path]]) -> tuple[list[list[Path]], tuple[str, ...]]:
    """Return the first split with a label, if there is one, and a remark on those before it.

    Tests are published without labels: all of them -1, or empty, or without the column.
    """
    optional = replace(columns, require_label=False)
    reader = partial(_read_rows, data, optional, True)
    for number, paths in enumerate(splits):
        if any(row.label not in _NO_LABEL for row in _read_all(reader, paths)):
            names = ", ".join(path.name for path in chain.from_iterable(splits[:number]))
            test = ", ".join(path.name for path in paths)
            return [paths], (f"{names}: no labels, or all of them -1; {test} is the test",) if names else ()
    return [], ()


def _hash_files(settings: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(settings.encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _find_files(data: str, folder: Path) -> _Files:
    """Return the files of the data in a folder; without names of splits all are for training."""
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
    train, tests = _choose_files(files, folder, _GLUE_ORDER if data == "glue" else _ORDER)
    if empty := [path for path in (*train, *chain.from_iterable(tests[:1])) if not path.stat().st_size]:
        raise BadInput(f"{empty[0]}: empty file. Fill it, or remove it.")
    return _Files(train=train, tests=tests, others=files, unused=unused)


def _usage_of(folder: Path, files: _Files, test: Sequence[Path]) -> str:
    """Describe which files are for training and for testing, and why others are for neither."""
    unused, used = Counter(files.unused), (*files.train, *test)
    for name, paths in files.others.items():
        if paths[0] not in used:
            unused[f"of {'another' if split_name(name) else 'no'} split ({name})"] += len(paths)
    names, test_names = (quoted([str(path.relative_to(folder)) for path in paths]) for paths in (files.train, test))
    return usage_line(folder, names, test_names or "each fifth row of a label", used=len(used), unused=unused)


def _list_files(suffixes: Sequence[str], folder: Path, unused: Counter[str]) -> dict[str, list[Path]]:
    """Return the files of these kinds by name, or by the name of a split's folder, and count the others.

    A folder that only has a folder stands for it.
    """
    entries = sorted(folder.iterdir())
    visible = [path for path in entries if not is_junk(path.name)]
    for path in visible:
        require_target(path, suffixes)
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
) -> tuple[list[Path], list[list[Path]]]:
    if not splits_among(files, ends_with_split):
        return list(chain.from_iterable(files.values())), []
    names = splits_among(files, lambda _: True)
    others = sorted(files.keys() - set(names))
    train, tests = choose_splits(names, others, folder, "file", prefer=prefer)
    if not tests and others:
        raise ambiguous(
            folder,
            f"{quoted(train)} is all of the data, and each fifth row is for the test",
            f"{quoted(others)} belongs to the data too",
            "Call the file for the test test, or move away what is not to be used",
        )
    for_training, *for_tests = ([path for name in part for path in files[name]] for part in (train, *tests))
    return for_training, for_tests


def _choose_columns(config: BertSettings) -> Columns:
    if config.data == "glue" and config.columns is None:
        return Columns(text=None, pair=None, label=None)
    text, *others = split_columns(config.columns or "text")
    label = others.pop() if others else "label"
    return Columns(text=text, pair=others[0] if others else None, label=label if config.task == "classify" else None)


def _read_rows(data: str, columns: Columns, labelled: bool, path: Path) -> Iterator[Row]:
    if data == "json":
        return formats.read_json_lines(path, columns)
    if data == "text":
        return formats.read_documents(path)
    return formats.read_table(path, columns, quoted=data == "csv", labelled=labelled)


def _read_all(reader: Callable[[Path], Iterator[Row]], paths: Iterable[Path]) -> Iterator[Row]:
    return chain.from_iterable(map(reader, paths))
