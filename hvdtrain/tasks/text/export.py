"""Exports a trained BERT as a folder that transformers and --pretrained can load."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import FAILED, BadInput, EndOfRun
from hvdtrain.tasks.text.model import Bert, BertForMaskedLM
from hvdtrain.tasks.text.pretrained import CONFIG, FIXED, KEYS, WEIGHTS
from hvdtrain.tasks.text.tokenizer_files import ADDED_BY_NUMBER, SETTINGS, VOCABULARY
from hvdtrain.tasks.text.tokens import Texts
from hvdtrain.tasks.text.vocabulary import PAD, Vocabulary

FILES = {CONFIG, WEIGHTS, VOCABULARY, SETTINGS}


def require_exportable(folder: Path, *, runs: Path, replace: bool) -> None:
    """Raise BadInput before the training if `export` could not write; `replace` allows to replace an earlier export."""
    target = folder.resolve()
    if any(path.resolve().is_relative_to(target) for path in (Path(), runs)):
        raise BadInput(f"--export {folder}: the run itself uses this folder. Choose another.")
    try:
        names = {path.name for path in target.iterdir()} if target.exists() else set()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise BadInput(f"--export {folder}: cannot be written ({error.strerror}). Choose another folder.") from error
    if names and not (replace and names <= FILES):
        raise BadInput(f"--export {folder}: not empty. Remove its files, or choose another folder.")


def export(folder: Path, model: Bert, *, vocabulary: Vocabulary, labels: Sequence[str] = ()) -> None:
    """Write the folder atomically; an existing export is replaced. Raises OSError.

    `labels` are the names of a classifier's classes.
    """
    folder = folder.resolve()
    part_folder, former = (folder.with_name(f".{folder.name}.{kind}") for kind in ("part", "old"))
    shutil.rmtree(part_folder, ignore_errors=True)
    part_folder.mkdir(parents=True)
    try:
        weights = {name: weight.cpu().contiguous() for name, weight in model.state_dict().items()}
        try:
            save_file(weights, part_folder / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{part_folder / WEIGHTS}: {error}") from error
        pieces = "".join(f"{token}\n" for token in vocabulary.tokens[: vocabulary.pieces])
        (part_folder / VOCABULARY).write_text(pieces, encoding="utf-8")
        _write(part_folder / CONFIG, _config_document(model, labels, padding=vocabulary.id(PAD)))
        _write(part_folder / SETTINGS, _tokenizer_document(model, vocabulary))
        for path in (*part_folder.iterdir(), part_folder):
            _sync(path)
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            if strangers := {path.name for path in folder.iterdir()} - FILES:
                raise OSError(errno.ENOTEMPTY, f"{min(strangers)} has come into it")
            folder.rename(former)
        part_folder.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(part_folder, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)


def export_on_all(comm: Comm, folder: Path, make_model: Callable[[], Bert], texts: Texts) -> None:
    """Write the folder on rank 0, with the model that `make_model` returns; EndOfRun on all ranks if that fails."""
    reason = None
    if comm.rank == 0:
        try:
            export(folder, make_model(), vocabulary=texts.vocabulary, labels=texts.labels)
        except OSError as error:
            reason = error.strerror or str(error)
    reason = comm.allgather(reason)[0]
    if reason:
        line = f"--export {folder}: could not be written ({reason}). Find the weights in the run folder."
        raise EndOfRun(line, status=FAILED, reason="not exported")


def _config_document(model: Bert, labels: Sequence[str], *, padding: int) -> dict[str, Any]:
    head = "BertForMaskedLM" if isinstance(model, BertForMaskedLM) else "BertForSequenceClassification"
    config = {"architectures": [head], **FIXED}
    config |= {KEYS[field]: value for field, value in asdict(model.sizes).items()}
    config |= {"pad_token_id": padding}
    if model.sizes.attention_dropout is None:
        config[KEYS["attention_dropout"]] = model.sizes.dropout
    if labels:
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
        config["label2id"] = {label: number for number, label in enumerate(labels)}
    return config


def _tokenizer_document(model: Bert, vocabulary: Vocabulary) -> dict[str, Any]:
    added = {str(vocabulary.id(token.content)): asdict(token) for token in vocabulary.added}
    return ({ADDED_BY_NUMBER: added} if added else {}) | {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lower_case,
        "strip_accents": vocabulary.strip_accents,
        "model_max_length": model.sizes.positions,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
