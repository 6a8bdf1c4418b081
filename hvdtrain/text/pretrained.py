"""Pretrained BERTs: a folder written by transformers' save_pretrained, or a model's name on the Hugging Face hub.

config.json            the sizes
model.safetensors      the weights; or pytorch_model.bin, from which only tensors are read
vocab.txt              one token per line, at its number; without it, tokenizer.json has them
tokenizer_config.json  whether texts are lower-cased; else tokenizer.json; the default is lower case
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
from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.files import read_file
from hvdtrain.text.model import NORM_EPS, BertSizes
from hvdtrain.text.vocabulary import SPECIALS, Vocabulary, make_vocabulary

CONFIG, WEIGHTS, PICKLED_WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "pytorch_model.bin", "vocab.txt"
TOKENIZER, TOKENS = "tokenizer_config.json", "tokenizer.json"
KEYS = {  # names in config.json, by the field of BertSizes
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "initializer_range": "initializer_range",
}
FIXED = {  # values in config.json that this BERT does not support otherwise
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": NORM_EPS,
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
_TOKENIZER_FIXED = {"tokenize_chinese_chars": True}
_NORMALIZER_FIXED = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
_SILENCE_S = 15.0
_ROUNDING = 128  # a model may have embeddings for more tokens, to round its sizes
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The facts of a pretrained model before its weights are read."""

    source: str  # as given by the user
    folder: Path  # on this host
    sizes: BertSizes
    vocabulary: Vocabulary
    labels: tuple[str, ...] = ()  # of its classifier, by number; empty if config.json has no names for them

    def require_positions(self, max_tokens: int) -> None:
        """Raise BadInput if sequences are longer than the model has positions."""
        if max_tokens > self.sizes.positions:
            raise BadInput(
                f"--max-tokens {max_tokens}: --pretrained {self.source} has {self.sizes.positions} positions. Pass "
                f"at most {self.sizes.positions}."
            )

    def require_vocabulary(self, vocabulary: Vocabulary, source: str) -> None:
        """Raise BadInput if the vocabulary is not the model's."""
        if vocabulary == self.vocabulary:
            return
        tokens, expected = vocabulary.tokens, self.vocabulary.tokens
        start = next(
            (number for number, pair in enumerate(zip(tokens, expected, strict=False)) if len({*pair}) > 1), None
        )
        if start is not None:
            difference = f"different from token {start} on"
        elif len(tokens) != len(expected):
            difference = f"{len(tokens)} tokens instead of {len(expected)}"
        else:
            difference = "its tokenizer_config.json treats case or accents differently"
        raise BadInput(
            f"--tokenizer {source}: not the vocabulary of --pretrained {self.source} ({difference}). Leave "
            "--tokenizer out."
        )


def pretrained_on_all(comm: Comm, source: str) -> Pretrained:
    """Return the pretrained model on all ranks, downloaded once per host if it is on the hub; see `read_pretrained`."""
    agree(comm, lambda: fetch_folder(source) if comm.local_rank == 0 else None)
    pretrained = agree(comm, lambda: read_pretrained(fetch_folder(source, offline=True), source))
    facts = json.dumps([vars(pretrained.sizes), vars(pretrained.vocabulary), pretrained.labels]).encode()
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
    files = HfApi().model_info(source, timeout=_SILENCE_S).siblings or []
    weights = WEIGHTS if WEIGHTS in {file.rfilename for file in files} else PICKLED_WEIGHTS
    snapshot_download(source, allow_patterns=[CONFIG, VOCABULARY, TOKENS, TOKENIZER, weights])


def read_pretrained(folder: Path, source: str) -> Pretrained:
    """Read everything in the folder except the weights; BadInput if it is missing, truncated or not such a BERT."""
    config = _read_document(folder / CONFIG, source)
    if not (folder / WEIGHTS).is_file() and not (folder / PICKLED_WEIGHTS).is_file():
        raise BadInput(
            f"--pretrained {source}: neither {WEIGHTS} nor {PICKLED_WEIGHTS} found. Pass a folder with one of them."
        )
    sizes = _parse_sizes(config, source)
    return Pretrained(
        source=source,
        folder=folder,
        sizes=sizes,
        vocabulary=make_vocabulary(_read_tokens(folder, sizes, source), _read_case(folder, source)),
        labels=_parse_labels(config),
    )


def _read_text(path: Path, source: str) -> str:
    try:
        content = read_file(path)
        _require_whole(path, content, source)
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise BadInput(
            f"--pretrained {source}: {path.name} cannot be read ({reason}). Pass a complete folder."
        ) from error


def _require_whole(path: Path, content: bytes, source: str) -> None:
    """Raise BadInput if a file of the hub's cache does not match its name: git's hash, or a SHA-256."""
    blob = path.resolve()
    hashes = {
        40: hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest(),
        64: hashlib.sha256(content).hexdigest(),
    }
    if blob.parent.name == "blobs" and hashes.get(len(blob.name), blob.name) != blob.name:
        raise BadInput(
            f"--pretrained {source}: {path.name} is damaged on this host. Delete {blob} to download it again."
        )


def _read_document(path: Path, source: str) -> dict[str, Any]:
    try:
        document = json.loads(_read_text(path, source))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--pretrained {source}: {path.name} is truncated or not JSON. Download it again.") from error
    if not isinstance(document, dict):
        raise BadInput(f"--pretrained {source}: {path.name} is not a JSON object. Download it again.")
    return document


def _parse_sizes(config: Mapping[str, Any], source: str) -> BertSizes:
    _require_fixed(config, FIXED, CONFIG, source)
    defaults = {"types": 2, "dropout": 0.1, "initializer_range": 0.02}
    values = {field: config.get(key, defaults.get(field)) for field, key in KEYS.items()}
    for field, value in values.items():
        is_integer, minimum = field not in ("dropout", "initializer_range"), 2 if field == "types" else 1
        kinds = (int,) if is_integer else (int, float)
        if type(value) not in kinds or not (minimum <= value < 2**31 if is_integer else 0 <= value < 1):
            raise BadInput(
                f"--pretrained {source}: {CONFIG} has {KEYS[field]} {value!r}. Pass the folder of a BERT model."
            )
    if values["width"] % values["heads"]:
        raise BadInput(
            f"--pretrained {source}: {CONFIG} splits {values['width']} unevenly into {values['heads']} heads. Pass "
            "another model."
        )
    _require_fixed(config, {"attention_probs_dropout_prob": values["dropout"]}, CONFIG, source)
    return BertSizes(**values)


def _parse_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    by_number = config.get("id2label")
    if not isinstance(by_number, dict) or sorted(by_number) != sorted(str(number) for number in range(len(by_number))):
        return ()
    names = tuple(str(by_number[str(number)]) for number in range(len(by_number)))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names  # transformers' default


def _require_fixed(settings: Mapping[str, Any], fixed: Mapping[str, Any], file: str, source: str) -> None:
    for key, value in fixed.items():
        if settings.get(key, value) != value:
            raise BadInput(
                f"--pretrained {source}: {file} has {key} {settings[key]!r}, and only {value!r} is supported. Pass "
                "another model."
            )


def _read_case(folder: Path, source: str) -> Mapping[str, Any]:
    """Read case and accents from tokenizer_config.json, else from tokenizer.json (transformers 5)."""
    settings = _read_document(folder / TOKENIZER, source) if (folder / TOKENIZER).exists() else {}
    _require_fixed(settings, _TOKENIZER_FIXED, TOKENIZER, source)
    if "do_lower_case" in settings or not (folder / TOKENS).exists():
        return settings
    normalizer = _read_document(folder / TOKENS, source).get("normalizer")
    normalizer = normalizer if isinstance(normalizer, dict) else {"type": normalizer}
    _require_fixed(normalizer, _NORMALIZER_FIXED, f"the normalizer of {TOKENS}", source)
    return {"do_lower_case": normalizer.get("lowercase", True), "strip_accents": normalizer.get("strip_accents")}


def _read_tokens(folder: Path, sizes: BertSizes, source: str) -> list[str]:
    if not (folder / VOCABULARY).exists() and (folder / TOKENS).exists():  # transformers 5 saves no other
        name, tokens = TOKENS, _read_wordpieces(_read_document(folder / TOKENS, source), source)
    else:
        name, text = VOCABULARY, _read_text(folder / VOCABULARY, source)
        tokens = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if missing := [token for token in SPECIALS if token not in tokens]:
        raise BadInput(f"--pretrained {source}: {name} has no {missing[0]}. Pass the model's own vocabulary.")
    if len(set(tokens)) < len(tokens):
        raise BadInput(f"--pretrained {source}: {name} has a token twice. Pass the model's own vocabulary.")
    if not 0 <= sizes.vocabulary - len(tokens) < _ROUNDING:
        raise BadInput(
            f"--pretrained {source}: {name} has {len(tokens)} tokens and the model {sizes.vocabulary}: truncated, or "
            "of another model. Download it again."
        )
    return tokens


def _read_wordpieces(document: Mapping[str, Any], source: str) -> list[str]:
    model = document.get("model")
    numbers = model.get("vocab") if isinstance(model, dict) and model.get("type") == "WordPiece" else None
    if not isinstance(numbers, dict) or sorted(map(str, numbers.values())) != sorted(map(str, range(len(numbers)))):
        raise BadInput(
            f"--pretrained {source}: {TOKENS} is not a WordPiece vocabulary. Pass a folder with {VOCABULARY}."
        )
    return sorted(numbers, key=numbers.__getitem__)
