"""The files of a comparison, each written atomically."""

from collections.abc import Mapping
from pathlib import Path

from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.files import new_file


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write each file under a temporary name and rename it; BadInput if the folder cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            part_file = folder / f"{name}.part"
            with new_file(part_file) as file:
                file.write(content)
            part_file.replace(folder / name)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written ({error.strerror or error}). Choose another --out.") from error
