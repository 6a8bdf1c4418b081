"""Rank 0's thread that writes checkpoints during training, and keeps the newest ones."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.files import Document
from hvdtrain.core.host_copies import copy_to_host
from hvdtrain.settings.safety.guard import CHECKPOINT_WRITE, Guard


class Writer:
    """Writes checkpoints in a thread, and keeps the newest ones.

    After an OSError it retries once; if the disk is full, it first removes the oldest checkpoint, unless that is the
    last one known to be good. `guard` counts a checkpoint that fails twice as CHECKPOINT_WRITE; the others are kept.
    The next call raises any other error.

    Checkpoints of later steps than the one just written belong to an abandoned history and are removed.
    """

    def __init__(
        self, root: Path, *, keep: int, guard: Guard, on_commit: Callable[[int], object], newest: int | None
    ) -> None:
        """Keep `keep` checkpoints; the thread calls `on_commit` with the step of each one that is complete on disk.

        `newest` is the step of the checkpoint that the run resumes from, if any.
        """
        self._root, self._keep, self._newest_good = root, {"step": keep, "best": 1}, newest
        self._guard, self._on_commit = guard, on_commit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: dict[str, Future[None]] = {}

    def submit(
        self,
        kind: str,
        step: int,
        write: Callable[..., object],
        documents: Mapping[str, Document],
        metadata: Mapping[str, Any],
    ) -> None:
        """Copy the documents to the CPU and return; the thread passes the copies to `write`.

        The kinds are "step", and "best", which replaces the previous best and is not committed.
        """
        self._finish(kind)
        documents, metadata = copy_to_host((dict(documents), dict(metadata)))
        self._running[kind] = self._thread.submit(self._save, kind, step, partial(write, documents, metadata=metadata))

    def note_failure(self, step: int, error: OSError) -> None:
        """Count an unfinished checkpoint with a rank file that could not be written, and remove its remains."""
        self._guard.note(CHECKPOINT_WRITE, self._root, error)
        checkpoint.discard(checkpoint.part_folder(self._root, step))

    def make_room(self, error: OSError) -> None:
        """After a disk-full error remove the oldest checkpoint, unless it is the last good one."""
        saved, good = checkpoint.list_checkpoints(self._root, "step"), self._newest_good
        older = [folder for number, folder in saved if good is not None and number < good]
        if checkpoint.is_full(error) and older:
            self._drop(older[0])

    def wait(self) -> None:
        """Return when all writes have completed or failed."""
        for kind in list(self._running):
            self._finish(kind)

    def _finish(self, kind: str) -> None:
        if running := self._running.pop(kind, None):
            running.result()

    def _save(self, kind: str, step: int, write: Callable[[], object]) -> None:
        with self._guard(CHECKPOINT_WRITE, self._root):
            try:
                write()
            except OSError as error:
                self.make_room(error)
                write()
            finally:
                checkpoint.discard(checkpoint.part_folder(self._root, step, kind=kind))
            if kind == "step":
                self._newest_good = step
                self._on_commit(step)
            saved = checkpoint.list_checkpoints(self._root, kind)
            kept_folders = [path for number, path in saved if number <= step][-self._keep[kind] :]
            for _, path in saved:
                if path not in kept_folders:
                    self._drop(path)

    def _drop(self, folder: Path) -> None:
        with self._guard("checkpoint removal", folder):
            checkpoint.remove(folder)
