"""Small data sets of text for tests: each label has words of its own, each text another length."""

import json
import random
from pathlib import Path

WORDS = {
    "animals": ["cat", "dog", "horse", "cow"],
    "plants": ["oak", "elm", "rose", "grass"],
    "stones": ["slate", "flint"],
}


def rows(count: int, *, longest: int = 20, seed: int = 0) -> list[dict[str, str]]:
    """Texts of 1 to `longest` words and their labels."""
    random_words = random.Random(seed)  # noqa: S311 (no secret)
    return [
        {"text": " ".join(random_words.choices(WORDS[label], k=1 + number * longest // count)), "label": label}
        for number, label in zip(range(count), list(WORDS) * count, strict=False)
    ]


def put(folder: Path, *, train: int = 48, test: int = 12, longest: int = 20) -> Path:
    """JSON lines to train on and to test with."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        lines = [json.dumps(row) + "\n" for row in rows(count, longest=longest, seed=len(name))]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder
