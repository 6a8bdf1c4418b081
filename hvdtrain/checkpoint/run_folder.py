"""The run folder, opened by rank 0 for all ranks."""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files, folder, snapshots
from hvdtrain.checkpoint.changes import describe_changes
from hvdtrain.checkpoint.files import StoredCheckpoint
from hvdtrain.checkpoint.folder import FolderLock
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import BadInput

LATE_S = 5.0  # how much later than rank 0's host another may see a new folder


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """An open run folder."""

    path: Path
    lock: FolderLock | None  # on rank 0 only
    apart: Collection[int]  # ranks that do not see the folder that rank 0 has opened: rank 0 writes and reads for them
    resume_from: StoredCheckpoint | None  # the same checkpoint on all ranks
    metadata: Mapping[str, Any]  # stored in its checkpoints, see changes.describe_run
    changes: list[str]  # differences from that checkpoint, one line each
    went_back: bool = False  # by --resume-from


def has_checkpoints(experiment: Path, run: str | None) -> bool:
    """Return whether `experiment` has a checkpoint of this run, by default the launcher's."""
    name = run or os.environ.get("HVDLAUNCH_JOB")
    return name is not None and bool(files.list_checkpoints(experiment / name / "checkpoints", "step"))


def unfinished_run(settings: Any) -> Path | None:
    """Return the folder of the run with these program.settings if it can be resumed."""
    name, run = settings.run_names
    experiment = settings.runs_dir / name
    path: Path = experiment / (run or os.environ.get("HVDLAUNCH_JOB", ""))
    has_ended = folder.is_finished(path) and settings.resume_from is None
    return path if has_checkpoints(experiment, run) and not has_ended else None


def _require_step(path: Path, step: int, metadata: Mapping[str, Any]) -> int | None:
    """Return the step to go back to; None if a run with these very settings has done so, and continues.

    Raises BadInput if the run does not have this checkpoint.
    """
    saved = files.list_checkpoints(path / "checkpoints", "step")
    if saved and not folder.is_finished(path):
        with contextlib.suppress(BadInput):
            if files.open_one(saved[-1][1]).metadata.get("config") == metadata["config"]:
                return None
    if step not in (steps := [number for number, _ in saved]):
        found = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
        raise BadInput(
            f"--resume-from {step}: {path} has no checkpoint of this step, but {found}. Name one of a run's steps, and "
            "the run with --run; --keep keeps more of them."
        )
    return step


def open_on_all(comm: Comm, settings: Any, metadata: Mapping[str, Any]) -> RunFolder:
    """Open the folder of a run with these program.settings: a new folder, or one with a checkpoint to resume from.

    The default for `run` is the launcher's name, or date and time. Raises BadInput if the checkpoint is incompatible
    with `metadata`, see `changes.describe_changes`; the folder's content is kept then.
    """
    experiment, run = settings.run_names
    job = os.environ.get("HVDLAUNCH_JOB") or datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    name = run or comm.allgather(job)[0]
    if not run and not re.fullmatch(r"\w[\w.-]*", name):  # a / would lead out of the experiment's folder
        raise BadInput(f"HVDLAUNCH_JOB={name!a}: not a plain name. Use letters, digits, '.', '_' and '-', or unset it.")
    path = settings.runs_dir / experiment / name
    attempt = fact(os.environ, "restart", 0)

    def step_to_go_back_to() -> int | None:
        step = settings.resume_from if comm.rank == 0 and attempt == 0 else None
        return None if step is None else _require_step(path, step, metadata)

    back_to = comm.allgather(agree(comm, step_to_go_back_to))[0]

    def open_it() -> FolderLock | None:
        if comm.rank != 0:
            return None
        # The previous attempt may take a moment to die.
        patience_s = 10.0 if attempt else 0.0
        lock = folder.open_folder(
            path, overwrite=settings.overwrite, goes_back=back_to is not None, patience_s=patience_s
        )
        memory = snapshots.open_file() if lock.is_resumed else None
        if memory is not None:
            is_written = snapshots.bring_to_disk(path / "checkpoints", memory, keep=settings.keep)
            os.close(memory)
            lock = replace(lock, has_saved=lock.has_saved or is_written)
        return lock

    lock = agree(comm, open_it)
    try:
        facts = lock and [lock.nonce, lock.is_resumed, lock.has_saved]
        nonce, is_resumed, has_saved = comm.allgather(facts)[0]

        patience_s = 0.0 if attempt else LATE_S
        are_sharing = comm.allgather(agree(comm, lambda: folder.is_shared(path, nonce, patience_s=patience_s)))
        apart = [rank for rank, is_sharing in enumerate(are_sharing) if not is_sharing]
        checkpoint, skipped = None, list[str]()
        if has_saved:
            checkpoint, skipped = files.find_newest(path / "checkpoints", comm, back_to, apart=apart)
        lines: list[str] = []

        def clear() -> bool:
            if checkpoint is None and skipped:
                raise BadInput(
                    f"{path}: no usable checkpoint ({skipped[0]}). Repair it, or choose another --run to start from "
                    "scratch."
                )
            if checkpoint is not None:
                lines.extend(describe_changes(checkpoint.metadata, metadata, type(settings)))
            if comm.rank == 0 and back_to is not None:
                lines.append(f"what is newer than step {back_to} is kept in {folder.move_newer(path, back_to)}")
            if comm.rank == 0:
                folder.clear(path, is_resumed=is_resumed, keep_checkpoints=checkpoint is not None)
            return comm.rank == 0 and not files.list_checkpoints(path / "checkpoints", "best")

        if comm.allgather(agree(comm, clear))[0] and checkpoint is not None:  # no file has the best weights until then
            counted = checkpoint.metadata["tracker"]["result"]
            counted |= {name: None for name in counted if name.startswith("best_")}
    except BadInput:
        if lock is not None:
            os.close(lock.descriptor)
        raise
    if lock is not None:
        exits.report(run_folder=str(path.resolve()), is_shared="no" if apart else "yes")
        for line in skipped:
            exits.print_message("warning", f"{line}; skipping this checkpoint")
    return RunFolder(
        path=path,
        lock=lock,
        apart=apart,
        resume_from=checkpoint,
        metadata=metadata,
        changes=lines,
        went_back=back_to is not None,
    )
