"""ICD-10-CM: short descriptions of diagnoses, each with its chapter, as classified by experts.

The data are part of the package simple-icd-10-cm, so a run needs no download. The package itself is never imported.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from xml.etree import ElementTree as ET

from hvdtrain.tasks.text.formats import Row

# Length of a code's prefix. Variants of a disease, such as left and right, are in the same split; otherwise the test
# would be too easy.
_FAMILY = 5
_TEST_SHARE = 10  # every tenth family, by its hash


def train() -> Iterator[Row]:
    """Yield nine in ten diagnoses, with other names for them."""
    return (row for code, row in _diagnoses() if not _is_for_test(code))


def test() -> Iterator[Row]:
    """Yield the remaining diagnoses."""
    return (row for code, row in _diagnoses() if _is_for_test(code))


def key() -> str:
    """Return the SHA-256 of the source files and of the rule for the split."""
    return hashlib.sha256(_file().read_bytes() + f"{_FAMILY} {_TEST_SHARE}".encode()).hexdigest()


def _is_for_test(code: str) -> bool:
    return int(hashlib.sha256(code[:_FAMILY].encode()).hexdigest(), 16) % _TEST_SHARE == 0


@cache
def _diagnoses() -> list[tuple[str, Row]]:
    """Return code, text and chapter of each description and of each inclusion term."""
    root = ET.parse(_file()).getroot()  # noqa: S314 (pinned by its hash, as all packages are)
    return [
        (diagnosis.findtext("name", ""), Row(text=text.text or "", label=chapter.findtext("name")))
        for chapter in root.iter("chapter")
        for diagnosis in chapter.iter("diag")
        for text in (*diagnosis.findall("desc"), *diagnosis.findall("inclusionTerm/note"))
    ]


def _file() -> Path:
    package = distribution("simple-icd-10-cm")
    [name] = [name for name in package.files or () if name.suffix == ".xml"]
    return Path(str(package.locate_file(name)))
