"""The file of a sweep or of a tuning, complete after every run: the same command reads it and resumes.

It lies in a folder of its own, with everything that must be equal for all its runs.
"""

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from launch.documents import Document, parse
from launch.errors import CommandError, LaunchError
from launch.files import held, read_text, write_whole
from launch.run.start.environment import is_secret
from launch.run.start.request import RunRequest

Row = TypeVar("Row")


def of_request(request: RunRequest, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options and variables of a run that must be equal for all runs."""
    variables = {
        name: value
        for name, value in sorted(environment.items())
        if _OF_SPEED.fullmatch(name) and not is_secret(name, value)
    }
    return {
        "launcher": request.launcher,
        "per_host": request.per_host,
        "ranks_per_replica": request.ranks_per_replica,
        "gpus": request.gpus if isinstance(request.gpus, str) else list(request.gpus),
        "bind": request.binding,
        "apptainer": request.apptainer,
        "network": request.network,
        "variables": variables,
    }


# They change the speed or the training itself; places and logs of a job do not.
_OF_SPEED = re.compile(
    r"(OMP|MKL|NCCL|UCX|FI|HOROVOD|HVDTRAIN|TORCH|PYTORCH|CUBLAS)_(?!\w*(HOME|DIR|FILE|PATH|CACHE|LOG|DEBUG|TIMELINE))\w+"
)


@contextlib.contextmanager
def held_folder(parent: str, name: str | None, prefix: str, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Hold the folder with the name, or one for these settings; CommandError for an invalid name, or one in use."""
    if name is None:
        name = f"{prefix}-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}"
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII) is None:
        raise CommandError(f"--name {name!r}: pass one folder's name, of letters, digits, '.', '_' and '-'")
    folder = Path(parent) / name
    with held(folder):
        yield folder


def read(file: Path, settings: Mapping[str, Any], key: str, row: Callable[[Document], Row]) -> list[Row]:
    """Return the rows in the list `key`, none without a file; CommandError if it is damaged or of other settings."""
    try:
        known = Document(parse(read_text(file)))
        rows = [row(Document(values, f"{key}[{number}]")) for number, values in enumerate(known.list(key))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} cannot be continued ({error}): choose another --name, or move it away") from error
    for name, value in settings.items():
        now = json.loads(json.dumps(value))
        before = known.values.get(name, now)
        if before != now:
            both = {**before, **now} if name == "variables" else {}
            which = [each for each in both if before.get(each) != now.get(each)]
            raise CommandError(
                f"{file} is of another {', '.join(which) or name}: choose another --name, or move it away"
            )
    return rows


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file of a run folder; empty if it is missing or incomplete."""
    try:
        return dict(Document(parse(read_text(file))).values)
    except (OSError, ValueError):
        return {}


def write(file: Path, document: Mapping[str, Any]) -> None:
    """Write the whole file; LaunchError if that fails."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, f"{json.dumps(document, indent=1)}\n")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Create a folder for the answers of ranks, visible to all hosts like the one from which a run is started."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hvdlaunch-", dir=Path.cwd()))
    except OSError as error:
        raise LaunchError(f"no folder can be made in {Path.cwd()} for what is measured: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
