"""The run folder before a run writes into it: made, locked, or found with checkpoints to go on from."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.safety.exits import FINISHED, BadInput

_LOCK = "lock"
_BEFORE = "ranks-before"  # what the ranks of the attempt before have left
_OURS = (
    *("*.json", "*.part", "*.png", "metrics.jsonl", "ranks", _BEFORE, "profile", "events.out.tfevents.*"),
    *("checkpoints", _LOCK),
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run folder that nobody else may use until this process ends."""

    lock: int  # a file descriptor
    nonce: str  # what the lock's file says, by which hosts see that the folder is one
    found: checkpoint.Found | None  # what to go on from
    passed_over: list[str]  # newer checkpoints that are of no use, and why


def open_folder(
    folder: Path,
    *,
    overwrite: bool,
    resume: bool,
    patience_s: float = 0.0,
    accept: Callable[[checkpoint.Found], object] = lambda _: None,
) -> Opened:
    """Lock a run folder and make it ready for a new run, or for one that goes on; called by rank 0 alone.

    Raises BadInput where it cannot be written, is in use (after `patience_s`), holds a finished run (unless
    `overwrite`) or something else, and where `accept` does, which is asked about the checkpoint to go on from. Then
    what is in the folder stays.
    """
    try:
        new = not folder.is_dir() or not any(folder.iterdir())
        if not new:
            _require_a_runs(folder)
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        lock = _locked(folder, patience_s)
        with contextlib.suppress(PermissionError):  # another user's
            folder.chmod(0o700)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        finished = _is_finished(folder)
        if finished and not overwrite:
            raise BadInput(f"{folder} holds a finished run: give another --run, or --overwrite to replace it")
        found, passed_over = None, list[str]()
        (folder / "checkpoints").mkdir(exist_ok=True)
        checkpoint.clean(folder / "checkpoints")
        goes_on = resume and not finished
        if goes_on:
            found, passed_over = checkpoint.newest(folder / "checkpoints")
            if found is None and passed_over:
                raise BadInput(
                    f"no checkpoint in {folder} can be used ({passed_over[0]}): mend it, or give --resume never to "
                    "start anew and lose them all"
                )
        if found is not None:
            accept(found)
        if goes_on and any((folder / "ranks").iterdir()):
            checkpoint.remove(folder / _BEFORE)
            (folder / "ranks").rename(folder / _BEFORE)
        kept = (_LOCK, *((_BEFORE,) if goes_on else ()))
        _clear(folder, but=kept if found is None else (*kept, "checkpoints", "metrics.jsonl", "events.out.*"))
        (folder / "ranks").mkdir()
        (folder / "checkpoints").mkdir(exist_ok=True)
        nonce = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}"
        os.ftruncate(lock, 0)
        os.write(lock, nonce.encode())
    except OSError as error:
        os.close(lock)
        raise _unwritable(folder, error) from error
    except BadInput:
        os.close(lock)
        raise
    return Opened(lock=lock, nonce=nonce, found=found, passed_over=passed_over)


def is_shared(folder: Path, nonce: str) -> bool:
    """Whether this host sees the folder that rank 0 has opened; where not, it gets one for its ranks' files.

    Raises BadInput where that cannot be written.
    """
    try:
        if (folder / _LOCK).is_file() and (folder / _LOCK).read_text() == nonce:
            return True
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return False


def _unwritable(folder: Path, error: OSError) -> BadInput:
    reason = error.strerror or error
    return BadInput(f"the run folder {folder} cannot be written ({reason}): give another --runs-dir")


def _require_a_runs(folder: Path) -> None:
    found = sorted(folder.iterdir())
    # A link to a file may lead to one that is not the run's, and would be cut or written to.
    links = [path.name for path in found if path.is_symlink() and not path.is_dir()]
    foreign = links or [path.name for path in found if not any(path.match(ours) for ours in _OURS)]
    if foreign or not (folder / "ranks").is_dir():
        raise BadInput(f"{folder} holds what is not a run's, as {(foreign or [found[0].name])[0]}: give another --run")


def _locked(folder: Path, patience_s: float) -> int:
    """The lock, which the kernel takes back when the process ends, however it does."""
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
            by = f", by process {owner[1]} on {owner[0]}" if len(owner) == 3 else ""
            raise BadInput(f"{folder} is in use{by}: wait for that run to end, or give another --run") from None
        return lock


def _clear(folder: Path, *, but: tuple[str, ...]) -> None:
    for path in folder.iterdir():
        if not any(path.match(kept) for kept in but):
            checkpoint.remove(path)


def _is_finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "result.json").read_text())["exit_reason"] == FINISHED)
    except (OSError, ValueError, KeyError, TypeError):
        return False
