"""The files of a comparison, each written atomically."""

from collections.abc import Mapping
from pathlib import Path

from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.files import write_atomically


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write each file; BadInput if the folder cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written ({error.strerror or error}). Choose another --out.") from error
