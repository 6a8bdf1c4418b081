"""The run folder before a run writes into it: made, locked, and cleared of what the run does not go on from."""

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
    """A run folder, locked until this process ends."""

    descriptor: int  # of the lock's file
    nonce: str  # content of the lock's file, by which hosts see that they share the folder
    is_resumed: bool  # from its newest checkpoint, if it has one
    has_saved: bool  # and it has some


def open_folder(folder: Path, *, overwrite: bool, resume: bool, patience_s: float = 0.0) -> FolderLock:
    """Lock a run folder, so that it can be searched for checkpoints and cleared; called by rank 0 only.

    Raises BadInput if the folder cannot be written, is still in use after `patience_s`, or holds a finished run (unless
    `overwrite`) or foreign files. Then its content stays.
    """
    try:
        new = not folder.is_dir() or not any(folder.iterdir())
        if not new:
            _require_run_folder(folder)
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        lock = _lock(folder, patience_s)
        with contextlib.suppress(PermissionError):  # it is another user's
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
    """The lock of a folder whose writer has died, as a file descriptor; none where this host does not get it."""
    with contextlib.suppress(OSError, BadInput):
        return [_lock(folder, 0.0)]
    return []


def clear(folder: Path, *, is_resumed: bool, keep_checkpoints: bool) -> None:
    """Make an open folder ready for a new run, or for one that goes on; called by rank 0 only.

    With `is_resumed` the files of the previous ranks are kept, with `keep_checkpoints` also what the run has written up
    to now. Raises BadInput if the folder cannot be written.
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
    """Whether this host sees the folder that rank 0 has opened; if not, it gets one for its ranks' files.

    Raises BadInput if that cannot be written.
    """
    try:
        if (folder / _LOCK).is_file() and (folder / _LOCK).read_text() == nonce:
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
    # A link may lead to a file that is not the run's, which would then be cut or overwritten.
    links = [path.name for path in paths if path.is_symlink() and not path.is_dir()]
    foreign = links or [path.name for path in paths if not any(path.match(pattern) for pattern in _RUN_FILES)]
    if foreign or not (folder / "ranks").is_dir():
        raise BadInput(
            f"{folder}: holds files that are not a run's, such as {(foreign or [paths[0].name])[0]}. Choose another "
            "--run."
        )


def _lock(folder: Path, patience_s: float) -> int:
    """The lock, as a file descriptor; the kernel releases it however the process ends."""
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
    """Whether a run has ended in this folder, so that nothing goes on from it."""
    try:
        return bool(json.loads((folder / "result.json").read_text())["exit_reason"] == FINISHED)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
