"""The run folder of all ranks: opened by rank 0, seen by the others."""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import files, folder
from hvdtrain.checkpoint.changes import changed
from hvdtrain.checkpoint.files import Found
from hvdtrain.checkpoint.folder import Opened
from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run folder that is open."""

    path: Path
    opened: Opened | None  # on rank 0 alone
    resume_from: Found | None  # the same checkpoint on every rank
    about: Mapping[str, Any]  # what its checkpoints are about, see changes.about
    changes: list[str]  # on rank 0: what is not as it was in that checkpoint, one line each


def open_on_all(
    comm: Comm,
    experiment: Path,
    run: str | None,
    *,
    overwrite: bool,
    resume: bool,
    about: Mapping[str, Any],
    shaping: Collection[str],
    aside: Collection[str],
) -> RunFolder:
    """The run folder in `experiment`, for this run alone: a new one, or one with a checkpoint to go on from.

    Without `run` its name is the launcher's, or date and time. BadInput, with all in the folder kept, where that
    checkpoint is of something else than `about`, see `changes.changed`.
    """
    os.umask(0o077)  # what a run leaves is for its owner alone
    job = os.environ.get("HVDLAUNCH_JOB") or datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path = experiment / (run or comm.allgather(job)[0])
    attempt = int(os.environ.get("HVDLAUNCH_ATTEMPT", "0"))
    lines: list[str] = []

    def open_it() -> Opened | None:
        if comm.rank != 0:
            return None
        # The attempt before may take a moment to die.
        return folder.open_folder(
            path,
            overwrite=overwrite,
            resume=resume or attempt > 0,  # "never" is not for what this run has saved itself
            patience_s=10.0 if attempt else 0.0,
            accept=lambda found: lines.extend(changed(found.about, about, shaping=shaping, aside=aside)),
        )

    opened = agreed(comm, open_it)
    facts = None
    if opened is not None:
        facts = [opened.nonce, opened.found and opened.found.folder.name, opened.passed_over]
        exits.report(run_folder=str(path.resolve()))
    nonce, found, passed_over = comm.allgather(facts)[0]
    if comm.rank == 0:
        for line in passed_over:
            print(f"hvdtrain: passed over {line}", file=sys.stderr, flush=True)

    def look() -> Found | None:
        shared = folder.is_shared(path, nonce)
        if not shared and (found is not None or "HVDLAUNCH_ATTEMPT" in os.environ):
            raise BadInput(
                f"{path} here is not the folder that rank 0 has opened: --restarts and resuming need one that all "
                "hosts share, put --runs-dir there"
            )
        return None if found is None else files.open_one(path / "checkpoints" / found)

    return RunFolder(path=path, opened=opened, resume_from=agreed(comm, look), about=about, changes=lines)
