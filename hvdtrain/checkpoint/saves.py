"""The checkpoints of a run: each rank writes what is its own, then rank 0 the rest while they train on."""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from hvdtrain.checkpoint import files, state
from hvdtrain.checkpoint.files import Fingerprint
from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.run_folder import RunFolder
from hvdtrain.checkpoint.state import State
from hvdtrain.checkpoint.writer import Writer
from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.replicas import check_replicas
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput, EndOfRun
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.guard import Guard, is_out_of_memory
from hvdtrain.stages.whole import whole_on_0
from hvdtrain.tracking.run import Run

T = TypeVar("T")


class Saves:
    """Takes checkpoints; all ranks call its methods together."""

    def __init__(
        self,
        parts: State,
        folder: Path,
        *,
        about: Mapping[str, Any],
        memory: Callable[[], Mapping[str, Any]],
        guard: Guard,
        keep: int,
        newest: int | None,
        shared: bool = True,
        outlived: bool = False,
        faults: Faults = NONE,
    ) -> None:
        """Save these parts of a training into `folder`, and say in each manifest what it is `about`, see `changes`.

        `memory` is what the tracker must know to go on from a checkpoint, `guard` counts what cannot be written, `keep`
        is how many to keep, and `newest` the step of the checkpoint that this run goes on from, if it does. A rank that
        does not see the folder that rank 0 writes into, which is not `shared` then, cannot save what is its own. Where
        rank 0 may be `outlived` by others, the best weights are on disk before they train on.
        """
        self._parts = parts
        self._comm = parts.comm
        self._about = dict(about)
        self._memory = memory
        self._folder = folder
        self._shared = shared
        self._outlived = outlived
        self._faults = faults
        self._count = 0
        self._taken = self._written = newest
        self._new_writer = partial(Writer, folder, keep=keep, guard=guard, committed=self._committed)
        self._writer: Writer | None = None
        if self._comm.rank == 0:
            self._writer = self._new_writer(newest=newest)
            if newest is not None:
                exits.report(checkpoint=str(newest))

    def go_on(self, **about: Any) -> None:
        """Some ranks were lost; what is said of the run in manifests has changed so. The lowest rank writes."""
        self._about |= about
        self._taken = None
        if self._comm.rank == 0 and self._writer is None:
            self._written = max((step for step, _ in files.numbered(self._folder, "step")), default=None)
            self._writer = self._new_writer(newest=self._written)

    def _committed(self, step: int) -> None:
        self._written = step
        exits.report(checkpoint=str(step))

    def save(self, position: Position) -> None:
        """Take a checkpoint, once for each step; training waits for the ranks' own files and a copy of the rest.

        And for the writer, if it is busy. Raises EndOfRun on all ranks where replicas differ.
        """
        if position.step == self._taken and self.wait(position.step):
            return
        self._taken = position.step
        check_replicas(self._comm, self._parts.model, position.step)
        content = files.pack(files.own(self._comm.rank), state.own(self._parts))
        ranks, failed = self._write_own(position.step, content)
        if failed:  # try once more, as the writer does
            if self._writer is not None:
                self._writer.make_room(failed)
            ranks, failed = self._write_own(position.step, content)
        self._count += 1
        if self._writer is not None:
            if failed:
                self._writer.failed(position.step, failed)
            else:
                about = {"position": asdict(position), **self._about, "tracker": self._memory()}
                if self._comm.part == "stage":
                    about["stages_at"] = list(self._parts.stages_at)
                if self._comm.part == "slice":
                    about["slices"] = self._comm.replica.size
                self._writer.save(position.step, {"state": state.shared(self._parts)}, about, ranks)
        self._faults.at("save", self._count)
        self._wait_for_rank_0()

    def _write_own(self, step: int, content: memoryview) -> tuple[dict[int, Fingerprint], OSError | None]:
        """Each rank writes its own file: what was written, on rank 0; the error of the first that could not, on all."""

        def begin() -> None:
            if self._writer is not None:
                self._writer.begin(step)

        _, failed = _tried(begin)
        failed = self._comm.allgather(failed)[0]
        if failed:
            return {}, OSError(*failed)

        part, rank = files.part_of(self._folder, step), self._comm.rank
        written, failed = _tried(
            lambda: asdict(files.put_own(part, rank, content)) if self._shared else None,
            who=f"rank {rank} on {socket.gethostname()}: " if rank > 0 else "",
        )
        answers = [json.loads(answer) for answer in self._comm.gather(json.dumps([written, failed]).encode())]
        failed = self._comm.allgather(next((error for _, error in answers if error), None))[0]
        own = {rank: Fingerprint(**one) for rank, (one, _) in enumerate(answers) if one}
        return own, OSError(*failed) if failed else None

    def save_best(self, position: Position, weights: torch.nn.Module, **metrics: float) -> None:
        """Keep the weights that were evaluated, apart from the checkpoints, with their metrics."""
        whole = whole_on_0(self._comm, weights)
        if self._writer is not None:
            about = {**metrics, "epoch": position.epoch + 1}
            self._writer.save_best(position.step, {"weights": whole}, about)
            if self._outlived:  # else, where this rank is lost while it writes, nobody has these weights any more
                self._writer.wait()
        self._wait_for_rank_0()

    def _wait_for_rank_0(self) -> None:
        """While the others still have the time limit of saving: their next step's is shorter."""
        self._comm.allgather(None)

    def wait(self, step: int) -> bool:
        """Wait for the writer; whether the newest checkpoint on disk is now of this step."""
        if self._writer is not None:
            self._writer.wait()
        return bool(self._comm.allgather(self._written)[0] == step)

    def leave(self, position: Position, *, run: str) -> NoReturn:
        """Leave with status 0 once the checkpoint is on disk, and with SIGTERM's where it cannot be written."""
        if self.wait(position.step):
            line = f"saved at step {position.step}; the same command with --run {run} goes on from there"
            raise EndOfRun(line, status=0, reason="preempted")
        raise EndOfRun("asked to leave, and no checkpoint could be written", status=143, reason="terminated")


def _tried(write: Callable[[], T], *, who: str = "") -> tuple[T | None, list[Any] | None]:
    """What it returned, and the number and text of an OSError, as JSON."""
    try:
        return write(), None
    except OSError as error:
        return None, [error.errno, f"{who}{error.strerror or error}"]


def resume(parts: State, found: files.Found) -> Position:
    """Bring a training back to a checkpoint: where it stands.

    Rank 0 reads what ranks have in common and broadcasts it, and each reads its own file and that of its part; where
    the files are of another number of ranks or other parts, rank 0 reads one after the other, and each rank those of
    all parts. Raises BadInput where the checkpoint cannot be read. That the settings fit was seen before the folder
    was opened.
    """
    position, comm = Position(**found.about["position"]), parts.comm
    stages_at, slices = tuple(found.about.get("stages_at", ())), found.about.get("slices", 1)
    own_slices = comm.replica.size if comm.part == "slice" else 1
    saved_parts = max(len(stages_at) + 1, slices)

    def mean() -> bytes:
        return bytes(files.pack("mean", state.mean_of(files.load(found, files.own(rank)) for rank in found.ranks)))

    def bring_back() -> None:
        mine = files.load(found, files.own(comm.rank)) if is_same else files.unpack(found, "mean", mean_of_all)
        saved = files.unpack(found, "state", in_common)
        if saved_parts > 1:
            needed = [comm.replica.rank] if fits else range(saved_parts)
            saved |= state.joined((files.load(found, files.own(part)) for part in needed), parts, fits=fits)
        elif comm.replica.size > 1:
            saved |= state.joined([state.by_name(saved)], parts, fits=False)
        state.restore(parts, saved, mine, step=position.step)

    fits = (stages_at, slices) == (parts.stages_at, own_slices)
    is_same = found.is_of(comm.size) and fits
    in_common = _broadcast(comm, lambda: files.read(found, "state"))
    mean_of_all = b"" if is_same else _broadcast(comm, lambda: _fitting(found, mean))
    agreed(comm, lambda: _fitting(found, bring_back))
    return position


def _broadcast(comm: Comm, read: Callable[[], bytes]) -> bytes:
    """What rank 0 reads; BadInput on all ranks if it cannot."""
    return comm.broadcast(agreed(comm, lambda: read() if comm.rank == 0 else b""))


def _fitting(found: files.Found, use: Callable[[], T]) -> T:
    """What it returns; BadInput if the checkpoint, which is not damaged, is of something else."""
    try:
        return use()
    except Exception as error:
        if isinstance(error, BadInput) or is_out_of_memory(error):
            raise
        raise BadInput(
            f"{found.folder} does not fit this run ({type(error).__name__}): give --resume never to start anew"
        ) from error


def saves_of(run: Run, folder: RunFolder, parts: State, *, keep: int, elastic: bool) -> Saves:
    """The checkpoints of an open run, which goes on from the one in `folder` if there is one."""
    return Saves(
        parts,
        folder.path / "checkpoints",
        about=folder.about,
        memory=run.tracker.memory,
        guard=run.tracker.guard,
        keep=keep,
        newest=None if folder.resume_from is None else folder.resume_from.step,
        shared=folder.shared,
        outlived=elastic,
        faults=run.faults,
    )
