"""Tokenized texts on disk: made once per host, cached by a hash of their sources, memory-mapped by every rank.

A folder in ~/.cache/hvdtrain/tokens has tokens.bin, offsets.npy, labels.npy, vocab.txt, about.json with the size and
SHA-256 of each, and about.sha256 with its own hash.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import tokenizers

from hvdtrain.insight.tracking.console import ItemCount, counted
from hvdtrain.insight.tracking.files import write_json
from hvdtrain.loop.feed.sequences import Sequences
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text.corpus import Corpus
from hvdtrain.tasks.text.formats import Row
from hvdtrain.tasks.text.vocabulary import END, START, UNKNOWN, Added, Vocabulary, learn_vocabulary

_VERSION = 7  # of the conversion of a file's rows into tokens
_ROWS_AT_A_TIME = 1000  # rows
_MANIFEST, _MANIFEST_SHA256 = "about.json", "about.sha256"
_TRUTH = {"false": "0", "no": "0", "true": "1", "yes": "1"}
_INTEGER = re.compile(r"0|-?[1-9]\d*", re.ASCII)
_PART = ".part-"  # prefix of a folder that is being written
_SHOWN_SHARE = 1e-4  # of unknown tokens
_DEAD_AFTER_S = 24 * 3600.0  # without a write to any file


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How sequences are made of a corpus."""

    vocabulary: Vocabulary | None  # None to learn one from the training texts
    vocab_size: int  # maximum size of a learned one
    max_tokens: int
    in_blocks: bool  # a longer text becomes several sequences, instead of being truncated
    labelled: bool


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A tokenized data set."""

    train: Sequences
    test: Sequences
    vocabulary: Vocabulary
    labels: tuple[str, ...]  # by number
    cut_count: int  # number of truncated texts
    unknown_share: float  # share of the tokens that are [UNK]
    sha256: str  # of the whole data set
    remarks: tuple[str, ...] = ()  # for the user, on what the texts lose


def prepare(corpus: Corpus, shape: Shape) -> str:
    """Return the key of the tokenized corpus, which is created if needed; BadInput if it is damaged.

    Called by one rank of each host.
    """
    vocabulary_key = shape.vocab_size if shape.vocabulary is None else shape.vocabulary.sha256
    content = corpus.key()
    ingredients = [
        _VERSION,
        tokenizers.__version__,
        content,
        vocabulary_key,
        shape.max_tokens,
        shape.in_blocks,
        shape.labelled,
    ]
    key = hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]
    folder = _cache() / key
    if not folder.exists():
        _make(folder, corpus, shape, content=content)
    _require_whole(folder)
    return key


def open_texts(key: str) -> Texts:
    """Open the texts that `prepare` has made, memory-mapped."""
    folder = _cache() / key
    try:
        manifest, sha256 = _read_manifest(folder)
        offsets, labels = np.load(folder / "offsets.npy"), np.load(folder / "labels.npy")
        tokens = np.memmap(folder / "tokens.bin", dtype=manifest["dtype"], mode="r")
        pieces = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, ValueError, EOFError) as error:
        raise _damage_error(folder, error) from error
    starts, lengths, train = offsets[:-1], np.diff(offsets), manifest["train"]
    # Evaluation batches consist of neighbours in this order: equal lengths need little padding.
    test = train + np.argsort(lengths[train:], kind="stable")
    return Texts(
        train=Sequences(tokens, starts=starts[:train], lengths=lengths[:train], labels=labels[:train], content=sha256),
        test=Sequences(tokens, starts=starts[test], lengths=lengths[test], labels=labels[test], content=sha256),
        vocabulary=Vocabulary(
            tokens=(*pieces, *manifest["appended"]),
            pieces=len(pieces) if manifest["appended"] else None,
            added=tuple(Added(**token) for token in manifest["added"]),
            lower_case=manifest["lower_case"],
            strip_accents=manifest["strip_accents"],
        ),
        labels=tuple(manifest["labels"]),
        cut_count=manifest["cut"],
        unknown_share=manifest["unknown"] / len(tokens),
        sha256=sha256,
        remarks=tuple(manifest["remarks"]),
    )


def _cache() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(cache_home if cache_home.startswith("/") else "~/.cache").expanduser() / "hvdtrain" / "tokens"
    except RuntimeError as error:
        raise BadInput("no home folder to keep tokens in. Name another folder in XDG_CACHE_HOME.") from error


def _make(folder: Path, corpus: Corpus, shape: Shape, *, content: str) -> None:
    """Write under a temporary name and rename; another host or run may have been faster."""
    part_folder = folder.with_name(f"{_PART}{uuid4().hex}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(folder.parent)
        part_folder.mkdir()
        _write(part_folder, corpus, shape)
        if corpus.key() != content:
            raise BadInput("--data-dir: a file was changed while it was read. Start again when it is complete.")
        part_folder.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise BadInput(
                f"{folder.parent}: tokens cannot be written ({error.strerror}). Free some space, or name another "
                "folder in XDG_CACHE_HOME."
            ) from error
    finally:
        shutil.rmtree(part_folder, ignore_errors=True)


def _remove_dead(cache: Path) -> None:
    """Remove unfinished folders of killed processes."""
    for part in cache.glob(f"{_PART}*"):
        with contextlib.suppress(OSError):
            changed_at = max(path.stat().st_mtime for path in (part, *part.iterdir()))
            if changed_at < time.time() - _DEAD_AFTER_S:
                shutil.rmtree(part, ignore_errors=True)


def _write(folder: Path, corpus: Corpus, shape: Shape) -> None:
    vocabulary = shape.vocabulary or learn_vocabulary(
        lambda: (
            text
            for row in _with_progress(corpus.train(), "learning the vocabulary")
            if row.label is not None or not shape.labelled
            for text in _texts(row)
        ),
        shape.vocab_size,
    )
    dtype = np.dtype("<u2" if len(vocabulary.tokens) < 2**16 else "<u4")
    lengths: list[int] = []
    labels: list[str] = []
    left_out = 0
    cut_count = unknown_count = train = 0
    unknown_id = vocabulary.id(UNKNOWN)
    with (folder / "tokens.bin").open("wb") as file:
        for rows in (corpus.train(), corpus.test()):
            train = len(lengths)
            for numbers, label, is_cut in _sequences(_with_progress(rows, "reading texts"), vocabulary, shape):
                if label is None and shape.labelled:
                    left_out += 1
                    continue
                file.write(np.array(numbers, dtype).tobytes())
                lengths.append(len(numbers))
                labels.append(label or "")
                cut_count += is_cut
                unknown_count += numbers.count(unknown_id)
    if not train or train == len(lengths):
        raise BadInput(f"--data: {train} training and {len(lengths) - train} test texts. Pass some of both.")
    names = _label_names(labels[:train], labels[train:]) if shape.labelled else []
    by_name = {name: number for number, name in enumerate(names)}
    number_of = {spelling: by_name.get(name, 0) for spelling, name in label_spellings(labels).items()}
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    np.save(folder / "labels.npy", np.array([number_of[label] for label in labels], dtype=np.int64))
    lines = "".join(f"{token}\n" for token in vocabulary.tokens[: vocabulary.pieces])
    (folder / "vocab.txt").write_text(lines, encoding="utf-8", newline="\n")
    manifest = {
        "version": _VERSION,
        "train": train,
        "test": len(lengths) - train,
        "cut": cut_count,
        "unknown": unknown_count,
        "remarks": [
            *corpus.remarks,
            *_remark_on_labels(names, left_out),
            *_remark_on_tokens(cut_count, shape.max_tokens, unknown_count / sum(lengths)),
        ],
        "labels": names,
        "appended": [] if vocabulary.pieces is None else vocabulary.tokens[vocabulary.pieces :],
        "added": [asdict(token) for token in vocabulary.added],
        "lower_case": vocabulary.lower_case,
        "strip_accents": vocabulary.strip_accents,
        "dtype": dtype.str,
        "files": {path.name: _fingerprint(path) for path in sorted(folder.iterdir())},
    }
    write_json(folder / _MANIFEST, manifest)
    (folder / _MANIFEST_SHA256).write_text(_fingerprint(folder / _MANIFEST)["sha256"])


def _remark_on_labels(names: Sequence[str], left_out: int) -> Iterator[str]:
    if left_out:
        yield f"{left_out} texts are left out: their gold_label is '-' (no majority chose one), or cells are missing"
    if "-1" in names and len(names) > 2:
        yield "-1 is one of the labels: remove its rows if it stands for texts without a label"


def _remark_on_tokens(cut_count: int, max_tokens: int, unknown_share: float) -> Iterator[str]:
    if cut_count:
        yield f"{cut_count} texts are cut off after --max-tokens {max_tokens}"
    if unknown_share >= _SHOWN_SHARE:
        yield f"{unknown_share:.2%} of the tokens are [UNK]: the vocabulary has no pieces for them"


def _texts(row: Row) -> list[str]:
    return [row.text] if row.pair is None else [row.text, row.pair]


def _with_progress(rows: Iterator[Row], what: str) -> Iterator[Row]:
    return counted(rows, ItemCount(what, None, " rows"))


def _sequences(
    rows: Iterator[Row], vocabulary: Vocabulary, shape: Shape
) -> Iterator[tuple[list[int], str | None, bool]]:
    """Yield each sequence's tokens, label, and whether it was truncated: [CLS] text [SEP], or with pair [SEP].

    Without labels both texts of a pair are separate sequences, so that [SEP] occurs only at the end, where nothing is
    masked.
    """
    if not shape.labelled:
        rows = (Row(text=text) for row in rows for text in _texts(row))
    encode, start, end = vocabulary.encoder(), vocabulary.id(START), vocabulary.id(END)
    while batch := list(islice(rows, _ROWS_AT_A_TIME)):
        texts, pairs = encode([row.text for row in batch]), encode([row.pair or "" for row in batch])
        for row, text, pair in zip(batch, texts, pairs, strict=True):
            limit = shape.max_tokens - 2
            if row.pair is not None:
                first, second = _shorten_pair(len(text), len(pair), limit - 1)
                is_cut = first + second < len(text) + len(pair)
                yield [start, *text[:first], end, *pair[:second], end], row.label, is_cut
            elif shape.in_blocks:
                for begin in range(0, len(text), limit):
                    yield [start, *text[begin : begin + limit], end], row.label, False
            else:
                yield [start, *text[:limit], end], row.label, len(text) > limit


def _shorten_pair(first: int, second: int, limit: int) -> tuple[int, int]:
    """Shorten two lengths until both fit, the longer one first."""
    kept = min(first, max(limit - second, (limit + 1) // 2))
    return kept, min(second, limit - kept)


def _label_names(train: Iterable[str | None], test: Iterable[str | None]) -> list[str]:
    """Return the labels of the training split in order, numbers by size."""
    train_labels, test_labels = ({label for label in labels if label is not None} for labels in (train, test))
    by_spelling = label_spellings(train_labels | test_labels)
    names, test_names = ({by_spelling[label] for label in labels} for labels in (train_labels, test_labels))
    if len(names) < 2:
        raise BadInput(
            f"training texts: {len(names)} labels, but at least two are needed. Add texts with other labels."
        )
    unknown_labels = sorted(test_names - names)
    if unknown_labels:
        raise BadInput(
            f"test texts: label {unknown_labels[0]!r} is not in the training texts. Remove its rows, or add it to "
            "the training texts."
        )
    by_case: dict[str, str] = {}
    for name in sorted(names):
        if (other := by_case.setdefault(name.casefold(), name)) != name:
            raise BadInput(f"training texts: labels {other!r} and {name!r} differ only in case. Write them alike.")
    if "-" in names and "+" not in names:
        raise BadInput("training texts: label '-' stands for no label, unless another is '+'. Remove its rows.")
    return sorted(names, key=_number_first)


def label_spellings(labels: Iterable[str]) -> dict[str, str]:
    """Return the name of each label: 1.0 is 1 if all are integers; true and yes are 1 if all are 0, 1 or such words."""
    names = {label: label for label in labels}
    words = {label.lower() for label in names}
    if words <= {"false", "true"}:
        return {label: label.capitalize() for label in names}
    if words <= {"no", "yes"}:
        return names
    integers = {label: label.removesuffix(".0") for label in names}
    truth = {label: _TRUTH.get(label.lower(), integer) for label, integer in integers.items()}
    if {*truth.values()} <= {"0", "1"}:
        return truth
    return integers if all(map(_INTEGER.fullmatch, integers.values())) else names


def _number_first(name: str) -> tuple[bool, float, str]:
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    return (False, number, name) if math.isfinite(number) else (True, 0.0, name)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """Read about.json, and its SHA-256; ValueError if the hash does not match."""
    content = (folder / _MANIFEST).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if (folder / _MANIFEST_SHA256).read_bytes() != sha256.encode():
        raise ValueError(f"{_MANIFEST} or {_MANIFEST_SHA256} has changed")
    manifest: dict[str, Any] = json.loads(content)
    return manifest, sha256


def _require_whole(folder: Path) -> None:
    """Raise BadInput if a file has changed since it was written."""
    try:
        manifest, _ = _read_manifest(folder)
        for name, expected in manifest["files"].items():
            if (actual := _fingerprint(folder / name)) != expected:
                raise ValueError(f"{name} has changed, or has {actual['bytes']} bytes instead of {expected['bytes']}")
    except (OSError, ValueError) as error:
        raise _damage_error(folder, error) from error


def _damage_error(folder: Path, error: Exception) -> BadInput:
    if isinstance(error, PermissionError):
        return BadInput(
            f"{error.filename or folder}: cannot be read ({error.strerror}). Ask its owner for access, or name another "
            "folder in XDG_CACHE_HOME."
        )
    reason = " ".join(str(error).split())
    return BadInput(f"{folder}: damaged ({reason}). Delete this folder; the next run makes it again.")
