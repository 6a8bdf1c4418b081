"""Prepares the run folder before a run writes to it: creates it, locks it, and removes files of an abandoned run."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.settings.safety.exits import FINISHED, BadInput
from hvdtrain.settings.safety.files import read_file

_LOCK = "lock"
_PREVIOUS_RANKS = "ranks-before"  # the files of the previous attempt's ranks
_MOVED = "after-*"  # what was newer when a run went back
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
    _MOVED,
    _LOCK,
)


@dataclass(frozen=True, kw_only=True)
class FolderLock:
    """A run folder that stays locked until this process ends."""

    descriptor: int  # of the lock file
    nonce: str  # content of the lock file; hosts compare it to find out whether they share the folder
    is_resumed: bool  # from its newest checkpoint, if there is one
    has_saved: bool  # whether it has a checkpoint


def open_folder(folder: Path, *, overwrite: bool, goes_back: bool = False, patience_s: float = 0.0) -> FolderLock:
    """Lock a run folder, so that it can be searched for checkpoints and cleared; called on rank 0 only.

    Raises BadInput if the folder is not writable, is still in use after `patience_s`, or holds foreign files or a
    finished run (unless it is replaced, or the run `goes_back` to one of its checkpoints). Its content is kept then.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _require_known_names(folder)  # before the lock: foreign folders are not touched
        lock = _lock(folder, patience_s)
    with contextlib.ExitStack() as undo, _writing(folder):
        undo.callback(_release, folder, lock)
        _require_run_folder(folder)
        with contextlib.suppress(PermissionError):  # another user owns it
            folder.chmod(0o700)
        finished = is_finished(folder)
        if finished and not overwrite and not goes_back:
            raise BadInput(
                f"{folder}: holds a finished run. Choose another --run, or pass --overwrite to replace that run."
            )
        for name in ("ranks", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)
        checkpoint.clean(folder / "checkpoints")
        nonce = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}"
        _sign(lock, nonce)
        undo.pop_all()
    is_resumed = goes_back or not finished
    has_saved = is_resumed and bool(checkpoint.list_checkpoints(folder / "checkpoints", "step"))
    return FolderLock(descriptor=lock, nonce=nonce, is_resumed=is_resumed, has_saved=has_saved)


def hold_again(folder: Path, lock: FolderLock) -> None:
    """Lock a folder that was removed or moved during its run: the run continues in a new one.

    Raises OSError if the folder cannot be created, or if another run, or another's files, have taken its place.
    """
    if _is_lock_of(folder, lock.descriptor):
        return
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _LOCK).exists() and read_file(folder / _LOCK) != lock.nonce.encode():
        raise OSError(errno.EBUSY, "the run folder was removed or moved, and another run has taken its place")
    try:
        _require_known_names(folder)
        again = _lock(folder, 0.0)
    except BadInput as error:
        raise OSError(errno.EBUSY, f"the run folder was removed or moved: {error}") from error
    _sign(again, lock.nonce)
    os.dup2(again, lock.descriptor, inheritable=False)
    os.close(again)


def clear(folder: Path, *, is_resumed: bool, keep_checkpoints: bool) -> None:
    """Prepare an open folder for a new or resumed run; called on rank 0 only.

    `is_resumed` keeps the files of the previous ranks, `keep_checkpoints` also what the run has written so far. Raises
    BadInput if the folder is not writable.
    """
    with _writing(folder):
        if is_resumed and any((folder / "ranks").iterdir()):
            checkpoint.remove(folder / _PREVIOUS_RANKS)
            (folder / "ranks").rename(folder / _PREVIOUS_RANKS)
        kept = [_LOCK]
        if is_resumed:
            kept += [_PREVIOUS_RANKS, _MOVED]
        if keep_checkpoints:
            kept += ["checkpoints", "metrics.jsonl", "events.out.*"]
        # The result is last: until then the run counts as finished, and is not resumed.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "result.json"):
            if not any(path.match(pattern) for pattern in kept):
                checkpoint.remove(path)
        for name in ("ranks", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)


def move_newer(folder: Path, step: int) -> Path:
    """Move what is newer than the checkpoint of a step into a new folder of the run, and return that; logs are copied.

    Raises BadInput if the folder is not writable.
    """
    with _writing(folder):
        number = next(number for number in itertools.count(1) if not (folder / f"after-{step}-{number}").exists())
        moved = folder / f"after-{step}-{number}"
        (moved / "checkpoints").mkdir(parents=True)
        for kind in ("step", "best"):
            for newer, path in checkpoint.list_checkpoints(folder / "checkpoints", kind):
                if newer > step:
                    path.rename(moved / "checkpoints" / path.name)
        for path in [folder / name for name in ("result.json", "config.json", "metrics.jsonl")]:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path, moved / path.name, follow_symlinks=False)
        for path in folder.glob("events.out.tfevents.*"):
            shutil.copyfile(path, moved / path.name, follow_symlinks=False)
    return moved


def is_shared(folder: Path, nonce: str, *, patience_s: float) -> bool:
    """Return whether this host sees the folder that rank 0 has opened; if not, create one for its ranks' files.

    A network's file system may show a new file late: look for patience_s seconds. Raises BadInput if that folder is not
    writable.
    """
    deadline_s = time.monotonic() + patience_s
    with _writing(folder):
        while True:
            with contextlib.suppress(FileNotFoundError):
                if read_file(folder / _LOCK) == nonce.encode():
                    return True
            if time.monotonic() >= deadline_s:
                break
            time.sleep(0.1)
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
    return False


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise BadInput if the folder cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"run folder {folder}: cannot be written ({reason}). Choose another --runs-dir.") from error


def _require_known_names(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    # A link may point to a foreign file, which would then be truncated or overwritten.
    links = [path.name for path in paths if path.is_symlink() and not path.is_dir()]
    if foreign := links or [path.name for path in paths if not any(path.match(pattern) for pattern in _RUN_FILES)]:
        raise _foreign_error(folder, foreign[0])


def _require_run_folder(folder: Path) -> None:
    """Raise BadInput unless the folder is empty or a run's: with files of ranks, or with a checkpoint."""
    _require_known_names(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
    saved = folder / "checkpoints"
    has_ranks = any((folder / name).is_dir() for name in ("ranks", _PREVIOUS_RANKS))
    if (
        names
        and not has_ranks
        and not any(checkpoint.can_resume(saved, step) for step, _ in checkpoint.list_checkpoints(saved, "step"))
    ):
        raise _foreign_error(folder, names[0])


def _foreign_error(folder: Path, name: str) -> BadInput:
    return BadInput(f"{folder}: holds files that are not a run's, such as {name}. Choose another --run.")


def _lock(folder: Path, patience_s: float) -> int:
    """Lock the file and return its descriptor; the kernel releases the lock when the process ends for any reason."""
    deadline = time.monotonic() + patience_s
    while True:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 1000, 0).decode(errors="replace").split()
            os.close(lock)
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            owner_text = f", by process {owner[1]} on {owner[0]}" if len(owner) == 3 else ""
            raise BadInput(
                f"{folder}: in use{owner_text}. Wait for that run to end, or choose another --run."
            ) from None
        if _is_lock_of(folder, lock):
            return lock
        os.close(lock)  # it was removed meanwhile


def _is_lock_of(folder: Path, lock: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(lock), (folder / _LOCK).stat())
    return False


def _sign(lock: int, nonce: str) -> None:
    os.ftruncate(lock, 0)
    os.write(lock, nonce.encode())


def _release(folder: Path, lock: int) -> None:
    """Release the lock of a folder that was refused; a file that `_lock` has created is removed."""
    if os.fstat(lock).st_size == 0:
        with contextlib.suppress(OSError):
            (folder / _LOCK).unlink()
    os.close(lock)


def is_finished(folder: Path) -> bool:
    """Return whether a run has finished in this folder, so that it cannot be resumed."""
    try:
        return bool(json.loads(read_file(folder / "result.json"))["exit_reason"] == FINISHED)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
