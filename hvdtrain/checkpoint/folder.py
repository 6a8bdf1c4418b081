"""Prepares the run folder before a run writes to it: creates it, locks it, and removes files of an abandoned run."""

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.safety.exits import FINISHED, BadInput
from hvdtrain.safety.files import read_file

_LOCK = "lock"
_PREVIOUS_RANKS = "ranks-before"  # the files of the previous attempt's ranks
_RUN_FILES = (
    "*.json",
    "*.part",
    "*.png",
    "metrics.jsonl",
    "ranks",
    _PREVIOUS_RANKS,
    "profile",
    "events.out.tfevents.*",
    "checkpoints",
    _LOCK,
)


@dataclass(frozen=True, kw_only=True)
class FolderLock:
    """A run folder that stays locked until this process ends."""

    descriptor: int  # of the lock file
    nonce: str  # content of the lock file; hosts compare it to find out whether they share the folder
    is_resumed: bool  # from its newest checkpoint, if there is one
    has_saved: bool  # whether it has a checkpoint


def open_folder(folder: Path, *, overwrite: bool, resume: bool, patience_s: float = 0.0) -> FolderLock:
    """Lock a run folder, so that it can be searched for checkpoints and cleared; called on rank 0 only.

    Raises BadInput if the folder is not writable, is still in use after `patience_s`, or holds foreign files or a
    finished run (unless `overwrite`). Its content is kept then.
    """
    try:
        new = not folder.is_dir() or not any(folder.iterdir())
        if not new:
            _require_run_folder(folder)
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        lock = _lock(folder, patience_s)
        with contextlib.suppress(PermissionError):  # another user owns it
            folder.chmod(0o700)
    except OSError as error:
        raise _write_error(folder, error) from error
    try:
        finished = is_finished(folder)
        if finished and not overwrite:
            raise BadInput(
                f"{folder}: holds a finished run. Choose another --run, or pass --overwrite to replace that run."
            )
        (folder / "checkpoints").mkdir(exist_ok=True)
        checkpoint.clean(folder / "checkpoints")
        nonce = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}"
        os.ftruncate(lock, 0)
        os.write(lock, nonce.encode())
    except OSError as error:
        os.close(lock)
        raise _write_error(folder, error) from error
    except BadInput:
        os.close(lock)
        raise
    is_resumed = resume and not finished
    has_saved = is_resumed and bool(checkpoint.list_checkpoints(folder / "checkpoints", "step"))
    return FolderLock(descriptor=lock, nonce=nonce, is_resumed=is_resumed, has_saved=has_saved)


def take_over(folder: Path) -> list[int]:
    """Lock a folder whose writer has died; return the lock's file descriptor in a list, empty if it is not free."""
    with contextlib.suppress(OSError, BadInput):
        return [_lock(folder, 0.0)]
    return []


def clear(folder: Path, *, is_resumed: bool, keep_checkpoints: bool) -> None:
    """Prepare an open folder for a new or resumed run; called on rank 0 only.

    `is_resumed` keeps the files of the previous ranks, `keep_checkpoints` also what the run has written so far. Raises
    BadInput if the folder is not writable.
    """
    try:
        if is_resumed and any((folder / "ranks").iterdir()):
            checkpoint.remove(folder / _PREVIOUS_RANKS)
            (folder / "ranks").rename(folder / _PREVIOUS_RANKS)
        names = (_LOCK, *((_PREVIOUS_RANKS,) if is_resumed else ()))
        _remove(folder, keep=(*names, "checkpoints", "metrics.jsonl", "events.out.*") if keep_checkpoints else names)
        (folder / "ranks").mkdir()
        (folder / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error


def is_shared(folder: Path, nonce: str) -> bool:
    """Return whether this host sees the folder that rank 0 has opened; if not, create one for its ranks' files.

    Raises BadInput if that folder is not writable.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            if read_file(folder / _LOCK) == nonce.encode():
                return True
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error
    return False


def _write_error(folder: Path, error: OSError) -> BadInput:
    reason = error.strerror or error
    return BadInput(f"run folder {folder}: cannot be written ({reason}). Choose another --runs-dir.")


def _require_run_folder(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    # A link may point to a foreign file, which would then be truncated or overwritten.
    links = [path.name for path in paths if path.is_symlink() and not path.is_dir()]
    foreign = links or [path.name for path in paths if not any(path.match(pattern) for pattern in _RUN_FILES)]
    if foreign or not (folder / "ranks").is_dir():
        raise BadInput(
            f"{folder}: holds files that are not a run's, such as {(foreign or [paths[0].name])[0]}. Choose another "
            "--run."
        )


def _lock(folder: Path, patience_s: float) -> int:
    """Lock the file and return its descriptor; the kernel releases the lock when the process ends for any reason."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            owner = os.pread(lock, 1000, 0).decode(errors="replace").split()
            os.close(lock)
            owner_text = f", by process {owner[1]} on {owner[0]}" if len(owner) == 3 else ""
            raise BadInput(
                f"{folder}: in use{owner_text}. Wait for that run to end, or choose another --run."
            ) from None
        return lock


def _remove(folder: Path, *, keep: tuple[str, ...]) -> None:
    for path in folder.iterdir():
        if not any(path.match(pattern) for pattern in keep):
            checkpoint.remove(path)


def is_finished(folder: Path) -> bool:
    """Return whether a run has finished in this folder, so that it cannot be resumed."""
    try:
        return bool(json.loads(read_file(folder / "result.json"))["exit_reason"] == FINISHED)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
