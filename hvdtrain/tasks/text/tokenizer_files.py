"""The tokenizer of a folder, read as transformers reads it.

tokenizer.json           tokens, normalizer and added tokens; without it, the other files have them
vocab.txt                one token per line, at its number; of two equal lines the second counts
tokenizer_config.json    whether texts are lower-cased, by default they are; added tokens by number
added_tokens.json, special_tokens_map.json   added tokens, if tokenizer_config.json does not list them
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.files import read_file
from hvdtrain.tasks.text.vocabulary import SPECIALS, Added, Vocabulary

VOCABULARY, TOKENS, SETTINGS = "vocab.txt", "tokenizer.json", "tokenizer_config.json"
ADDED, SPECIALS_MAP = "added_tokens.json", "special_tokens_map.json"
TOKENIZER_FILES = (VOCABULARY, TOKENS, SETTINGS, ADDED, SPECIALS_MAP)
ADDED_BY_NUMBER = "added_tokens_decoder"  # in tokenizer_config.json
_SETTINGS_FIXED = {"tokenize_chinese_chars": True, "word_tokenizer_type": "basic"}  # a Japanese BERT has mecab
_NORMALIZER_FIXED = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
_PRE_TOKENIZER_FIXED = {"type": "BertPreTokenizer"}
_MODEL_FIXED = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
_OF_ONE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that take all from tokenizer.json
_FURTHER, _FURTHER_BEFORE = "extra_special_tokens", "additional_special_tokens"  # since transformers 5, and before
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def read_vocabulary(path: Path, subject: str) -> Vocabulary:
    """Return the vocabulary of a folder, or of a vocab.txt and the files next to it; BadInput names the `subject`."""
    folder, file = (path, path / VOCABULARY) if path.is_dir() else (path.parent, path)
    settings = _read_if_exists(folder / SETTINGS, subject)
    require_fixed(settings, _SETTINGS_FIXED, SETTINGS, subject)
    document = _read_if_exists(folder / TOKENS, subject)
    if document and (path.is_dir() or file.name == TOKENS):
        name, tokens = TOKENS, _parse_wordpieces(document, subject)
    else:
        name, text = file.name, read_text(file, subject)
        tokens = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if missing := [token for token in SPECIALS if token not in tokens]:
        raise BadInput(f"{subject}: {name} lacks {', '.join(missing)}. Pass BERT's {VOCABULARY}, one token per line.")
    try:
        added = list(_parse_added(folder, settings, document, subject))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{subject}: its added tokens cannot be read ({error!r}). Download {SETTINGS} again.") from error
    lower_case, strip_accents = _parse_case(settings, document, subject)
    appended = _append(tokens, added, subject)
    return Vocabulary(
        tokens=(*tokens, *appended),
        pieces=len(tokens) if appended else None,
        added=tuple(token for _, token in added),
        lower_case=lower_case,
        strip_accents=strip_accents,
    )


def read_text(path: Path, subject: str) -> str:
    """Return the content of a file; BadInput if it cannot be read."""
    try:
        content = read_file(path)
        _require_whole(path, content, subject)
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise BadInput(f"{subject}: {path.name} cannot be read ({reason}). Pass a complete folder.") from error


def read_document(path: Path, subject: str) -> dict[str, Any]:
    """Return the JSON object in a file; BadInput if there is none."""
    try:
        document = json.loads(read_text(path, subject))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{subject}: {path.name} is truncated or not JSON. Download it again.") from error
    if not isinstance(document, dict):
        raise BadInput(f"{subject}: {path.name} is not a JSON object. Download it again.")
    return document


def require_fixed(settings: Mapping[str, Any], fixed: Mapping[str, Any], file: str, subject: str) -> None:
    """Raise BadInput if a setting has another value than the one that is supported."""
    for key, value in fixed.items():
        if settings.get(key, value) != value:
            raise BadInput(
                f"{subject}: {file} has {key} {settings[key]!r}, and only {value!r} is supported. Pass another model."
            )


def _read_if_exists(path: Path, subject: str) -> dict[str, Any]:
    return read_document(path, subject) if path.exists() else {}


def _require_whole(path: Path, content: bytes, subject: str) -> None:
    """Raise BadInput if a file of the hub's cache does not match its name: git's hash, or a SHA-256."""
    blob = path.resolve()
    hashes = {
        40: hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest(),
        64: hashlib.sha256(content).hexdigest(),
    }
    if blob.parent.name == "blobs" and hashes.get(len(blob.name), blob.name) != blob.name:
        raise BadInput(f"{subject}: {path.name} is damaged on this host. Delete {blob} to download it again.")


def _parse_wordpieces(document: Mapping[str, Any], subject: str) -> list[str]:
    model = document.get("model")
    model = model if isinstance(model, dict) and model.get("type") == "WordPiece" else {}
    numbers = model.get("vocab")
    if not isinstance(numbers, dict) or sorted(map(str, numbers.values())) != sorted(map(str, range(len(numbers)))):
        raise BadInput(f"{subject}: {TOKENS} is not a WordPiece vocabulary. Pass a folder with {VOCABULARY} only.")
    require_fixed(model, _MODEL_FIXED, f"the model of {TOKENS}", subject)
    return sorted(numbers, key=numbers.__getitem__)


def _parse_case(settings: Mapping[str, Any], document: Mapping[str, Any], subject: str) -> tuple[bool, bool | None]:
    """Return whether texts are lower-cased, and whether accents are stripped; None if that follows from the case."""
    if document and ("do_lower_case" not in settings or settings.get("tokenizer_class") in _OF_ONE_FILE):
        normalizer, pre_tokenizer = (
            part if isinstance(part := document.get(name, default), dict) else {"type": part}
            for name, default in (("normalizer", None), ("pre_tokenizer", {}))
        )
        require_fixed(normalizer, _NORMALIZER_FIXED, f"the normalizer of {TOKENS}", subject)
        require_fixed(pre_tokenizer, _PRE_TOKENIZER_FIXED, f"the pre_tokenizer of {TOKENS}", subject)
        settings = {
            "do_lower_case": normalizer.get("lowercase", True),
            "strip_accents": normalizer.get("strip_accents"),
        }
    lower_case, strip_accents = bool(settings.get("do_lower_case", True)), settings.get("strip_accents")
    return lower_case, None if strip_accents in (None, lower_case) else bool(strip_accents)


def _parse_added(
    folder: Path, settings: Mapping[str, Any], document: Mapping[str, Any], subject: str
) -> Iterator[tuple[int | None, Added]]:
    """Yield number and content of the added tokens in transformers' order; without a number, the next one is meant.

    BERT's own special tokens are not among them: in a text they are text.
    """
    specials = {**settings, _FURTHER: settings.get(_FURTHER) or settings.get(_FURTHER_BEFORE)}
    if ADDED_BY_NUMBER in settings:
        by_number = {int(number): _parse_token(token) for number, token in settings[ADDED_BY_NUMBER].items()}
    else:
        specials |= _read_if_exists(folder / SPECIALS_MAP, subject)
        contents = {token.content for token in _list_specials(specials)}
        by_number = {
            int(number): _parse_token({"content": content, "special": content in contents})
            for content, number in _read_if_exists(folder / ADDED, subject).items()
        }
        by_number |= {int(token["id"]): _parse_token(token) for token in document.get("added_tokens") or ()}
        specials[_FURTHER] = specials[_FURTHER] or specials.get(_FURTHER_BEFORE)
    numbered = sorted(by_number.items(), key=lambda item: item[0])
    seen = {*SPECIALS}
    for number, token in (*numbered, *((None, special) for special in _list_specials(specials))):
        if token.content not in seen:
            seen.add(token.content)
            yield number, token


def _list_specials(settings: Mapping[str, Any]) -> list[Added]:
    """Return the special tokens that settings name, such as bos_token, and further ones, as a list or by names."""
    keys = [key for key in dict.fromkeys(("bos_token", "eos_token", *settings)) if key.endswith("_token")]
    named = [settings[key] for key in keys if isinstance(settings.get(key), str | dict)]
    further = settings.get(_FURTHER) or []
    further = further.values() if isinstance(further, dict) else further
    return [_parse_token(token, special=True) for token in (*named, *further)]


def _parse_token(token: str | Mapping[str, Any], *, special: bool = False) -> Added:
    values = {"content": token} if isinstance(token, str) else token
    special = special or bool(values.get("special", False))
    flags = {"normalized": not special} | {flag: bool(values[flag]) for flag in _FLAGS if flag in values}
    return Added(content=str(values["content"]), special=special, **flags)


def _append(tokens: list[str], added: list[tuple[int | None, Added]], subject: str) -> list[str]:
    """Return the added tokens after the pieces; BadInput if the number of one differs from that in transformers."""
    number_of = {token: number for number, token in enumerate(tokens)}
    appended: list[str] = []
    for number, token in added:
        expected = number_of.setdefault(token.content, len(tokens) + len(appended))
        if expected == len(tokens) + len(appended):
            appended.append(token.content)
        if number not in (None, expected):
            raise BadInput(
                f"{subject}: the added token {token.content!r} has the number {number} instead of {expected}, the "
                "next one. Save the tokenizer again."
            )
    if appended and len({*tokens}) < len(tokens):
        raise BadInput(f"{subject}: added tokens, and a vocabulary that has a token twice. Save the tokenizer again.")
    return appended
