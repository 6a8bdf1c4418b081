"""Pretrained BERTs: a folder written by transformers' save_pretrained, or a model's name on the Hugging Face hub.

config.json            the sizes
model.safetensors      the weights; or pytorch_model.bin, from which only tensors are read; each of them may be
                       several files, with an index in .index.json

Its tokenizer: see tokenizer_files.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text.model import NORM_EPS, BertSizes
from hvdtrain.tasks.text.tokenizer_files import TOKENIZER_FILES, read_document, read_vocabulary, require_fixed
from hvdtrain.tasks.text.vocabulary import Vocabulary

CONFIG, WEIGHTS, PICKLED_WEIGHTS = "config.json", "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"  # after the name of weights in several files
KEYS = {  # names in config.json, by the field of BertSizes
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "classifier_dropout": "classifier_dropout",
    "initializer_range": "initializer_range",
}
FIXED = {  # values in config.json that this BERT does not support otherwise
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": NORM_EPS,
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
_OPTIONAL = ("attention_dropout", "classifier_dropout")  # fields that follow from the dropout
_SILENCE_S = 15.0
_ROUNDING = 128  # many models have embeddings for more tokens, to round their sizes
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The facts of a pretrained model before its weights are read."""

    source: str  # as given by the user
    folder: Path  # on this host
    sizes: BertSizes
    vocabulary: Vocabulary
    labels: tuple[str, ...] = ()  # of its classifier, by number; empty if config.json has no names for them

    @property
    def remarks(self) -> list[str]:
        """Lines for the user."""
        words, embeddings = len(self.vocabulary.tokens), self.sizes.vocabulary
        if embeddings - words < _ROUNDING:
            return []
        return [f"{self.source} has embeddings for {embeddings:,} tokens, and its vocabulary {words:,} tokens"]

    def require_positions(self, max_tokens: int) -> None:
        """Raise BadInput if sequences are longer than the model has positions."""
        if max_tokens > self.sizes.positions:
            raise BadInput(
                f"--max-tokens {max_tokens}: --pretrained {self.source} has {self.sizes.positions} positions. Pass "
                f"at most {self.sizes.positions}."
            )

    def require_vocabulary(self, vocabulary: Vocabulary, source: str) -> None:
        """Raise BadInput if the vocabulary is not the model's."""
        if vocabulary != self.vocabulary:
            what = "tokens" if vocabulary.tokens != self.vocabulary.tokens else "case, accents or added tokens"
            raise BadInput(
                f"--tokenizer {source}: not the vocabulary of --pretrained {self.source} (other {what}). Leave "
                "--tokenizer out."
            )


def pretrained_on_all(comm: Comm, source: str) -> Pretrained:
    """Return the pretrained model on all ranks, downloaded once per host if it is on the hub; see `read_pretrained`."""
    agree(comm, lambda: fetch_folder(source) if comm.local_rank == 0 else None)
    pretrained = agree(comm, lambda: read_pretrained(fetch_folder(source, offline=True), source))
    facts = json.dumps([vars(pretrained.sizes), pretrained.vocabulary.sha256, pretrained.labels]).encode()
    require_equal(comm, {f"what --pretrained {source} is (SHA-256)": hashlib.sha256(facts).hexdigest()})
    return pretrained


def fetch_folder(source: str, *, offline: bool = False) -> Path:
    """Return the folder of this name, or the local folder of the hub's model of this name, after downloading it.

    `offline`: it has already been downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists() or not _HUB_NAME.fullmatch(source):
        raise BadInput(
            f"--pretrained {source}: no such folder. Pass a folder with {CONFIG}, or the name of a model on the hub."
        )
    # The import takes 0.3 s, and most runs do not need it.
    from huggingface_hub import snapshot_download

    download_error: Exception | None = None
    if not offline:
        try:
            _download(source)
        except Exception as error:  # noqa: BLE001 (of the hub, the network or the disk)
            download_error = error
    try:
        return Path(snapshot_download(source, allow_patterns=[CONFIG], local_files_only=True))
    except (OSError, ValueError) as error:
        reason = " ".join(str(download_error or error).split())[:200]
        raise BadInput(
            f"--pretrained {source}: no such folder, and the hub's model of this name cannot be downloaded "
            f"({reason}). Download it elsewhere and pass its folder."
        ) from error


def _download(source: str) -> None:
    from huggingface_hub import HfApi, snapshot_download

    # A single request: a download would retry for minutes if the hub cannot be reached.
    names = {file.rfilename for file in HfApi().model_info(source, timeout=_SILENCE_S).siblings or []}
    whole = next((name for name in (WEIGHTS, PICKLED_WEIGHTS) if {name, name + _INDEX} & names), PICKLED_WEIGHTS)
    parts = [] if whole in names else [whole + _INDEX, whole.replace(".", "-*.")]
    snapshot_download(source, allow_patterns=[CONFIG, *TOKENIZER_FILES, whole, *parts])


def read_pretrained(folder: Path, source: str) -> Pretrained:
    """Read everything in the folder except the weights; BadInput if it is missing, truncated or not such a BERT."""
    subject = f"--pretrained {source}"
    config = read_document(folder / CONFIG, subject)
    find_weights(folder, source)
    sizes = _parse_sizes(config, source)
    vocabulary = read_vocabulary(folder, subject)
    if len(vocabulary.tokens) > sizes.vocabulary:
        raise BadInput(
            f"{subject}: its vocabulary has {len(vocabulary.tokens)} tokens and the model {sizes.vocabulary}: of "
            "another model. Download it again."
        )
    return Pretrained(source=source, folder=folder, sizes=sizes, vocabulary=vocabulary, labels=_parse_labels(config))


def find_weights(folder: Path, source: str) -> tuple[Path, ...]:
    """Return the files of the weights; BadInput if one is missing."""
    for name in (WEIGHTS, PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return (folder / name,)
        if (folder / (name + _INDEX)).is_file():
            return _read_index(folder / (name + _INDEX), source)
    raise BadInput(
        f"--pretrained {source}: neither {WEIGHTS} nor {PICKLED_WEIGHTS} found. Pass a folder with one of them."
    )


def _read_index(path: Path, source: str) -> tuple[Path, ...]:
    file_of = read_document(path, f"--pretrained {source}").get("weight_map")
    names = sorted(set(map(str, file_of.values()))) if isinstance(file_of, dict) else []
    missing = [name for name in names if Path(name).name != name or not (path.parent / name).is_file()]
    if missing or not names:
        named = missing[0] if missing else "no file of weights"
        raise BadInput(f"--pretrained {source}: {path.name} names {named}, which is missing. Download it again.")
    return tuple(path.parent / name for name in names)


def _parse_sizes(config: Mapping[str, Any], source: str) -> BertSizes:
    subject = f"--pretrained {source}"
    require_fixed(config, FIXED, CONFIG, subject)
    defaults = {"types": 2, "dropout": 0.1, "initializer_range": 0.02}
    values = {field: config.get(key, defaults.get(field)) for field, key in KEYS.items()}
    for field, value in values.items():
        if field in (*_OPTIONAL, "dropout", "initializer_range"):
            is_valid = type(value) in (int, float) and 0 <= value < 1
        else:
            is_valid = type(value) is int and (2 if field == "types" else 1) <= value < 2**31
        if not is_valid and (value is not None or field not in _OPTIONAL):
            raise BadInput(f"{subject}: {CONFIG} has {KEYS[field]} {value!r}. Pass the folder of a BERT model.")
    width, heads = values["width"], values["heads"]
    if width % heads:
        raise BadInput(f"{subject}: {CONFIG} splits {width} unevenly into {heads} heads. Pass another model.")
    same = [field for field in _OPTIONAL if values[field] == values["dropout"]]
    return BertSizes(**{**values, **dict.fromkeys(same)})


def _parse_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    by_number = config.get("id2label")
    if not isinstance(by_number, dict) or sorted(by_number) != sorted(str(number) for number in range(len(by_number))):
        return ()
    names = tuple(str(by_number[str(number)]) for number in range(len(by_number)))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names  # transformers' default
