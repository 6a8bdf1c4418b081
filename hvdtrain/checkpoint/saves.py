"""The checkpoints of a run: each rank writes its own state, then rank 0 the shared state during training."""

import hashlib
import json
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from hvdtrain.checkpoint import files, state
from hvdtrain.checkpoint.files import Fingerprint
from hvdtrain.checkpoint.folder import hold_again
from hvdtrain.checkpoint.run_folder import RunFolder
from hvdtrain.checkpoint.snapshots import Snapshots
from hvdtrain.checkpoint.state import State
from hvdtrain.checkpoint.writer import Writer
from hvdtrain.core.host_copies import copy_to_host
from hvdtrain.core.position import Position
from hvdtrain.core.replicas import check_replicas
from hvdtrain.core.step import Step
from hvdtrain.loop.hooks import EpochDone, Hook
from hvdtrain.loop.progress import Unreported
from hvdtrain.loop.save_points import Decision, SavePoints
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.wire import bits
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.errors import Preempted
from hvdtrain.settings.safety.exits import BadInput, EndOfRun
from hvdtrain.settings.safety.guard import is_out_of_memory

T = TypeVar("T")


class Saves(Hook):
    """Takes checkpoints at save points, before all ranks stop, and at the end, and keeps the best weights of a run.

    All methods are collectives.
    """

    def __init__(
        self,
        step: Step,
        parts: State,
        folder: RunFolder,
        run: Any,
        points: SavePoints,
        *,
        keep: int,
        snapshots: Snapshots | None = None,
        **metadata: Any,
    ) -> None:
        """Save these parts of a training; `metadata` goes into each manifest, with that of the folder.

        `run` is the tracking.run.Run. `keep` is the number of checkpoints to keep.
        """
        self.step, self.parts, self.run, self._points = step, parts, run, points
        self._comm = parts.comm
        self._run_folder, self._folder = folder, folder.path / "checkpoints"
        self._metadata = {**folder.metadata, **metadata}
        self._snapshots = snapshots
        self._count = 0
        self._taken_step = self._written_step = None if folder.resume_from is None else folder.resume_from.step
        self._writer = None
        if self._comm.rank == 0:
            self._writer = Writer(
                self._folder,
                keep=keep,
                guard=run.tracker.guard,
                on_commit=self._record_commit,
                newest=self._written_step,
            )
            if self._written_step is not None:
                exits.report(checkpoint=str(self._written_step))

    def act_on(self, decision: Decision, position: Position) -> None:
        """Save if all ranks have decided to; raise EndOfRun if they stop."""
        if decision.save:
            self.run.watch.begin_checkpoint(position.step)
            self._points.saved(self._save_timed(position))
        elif decision.snapshot:
            self.snapshot(position, Unreported())
        if decision.leave:
            self.end_run(position)

    def snapshot(self, position: Position, unreported: Unreported) -> None:
        if self._snapshots is None:
            return
        self.run.watch.begin_checkpoint(position.step)
        parts = replace(self.parts, optimizer=self.parts.how.whole(self.parts.optimizer))
        is_alike = self._comm.sync_group.size == self._comm.size and parts.optimizer is self.parts.optimizer

        def documents() -> tuple[dict[str, Any], dict[str, Any]]:
            models = parts.of_models()
            # Cheaper than those that check_replicas compares, which also find two elements in each other's place. A sum
            # into 32 bits is twice as fast as one into 64.
            values = [bits(one) for name, one in models[0].without_buffers.items() if name not in models[0].extra]
            sums = torch.stack([one.sum(dtype=torch.promote_types(one.dtype, torch.int32)) for one in values])
            shared = state.shared_state(parts, models) if is_alike or self._comm.rank == 0 else {}
            equal = {name: shared.pop(name) for name in state.OF_MODEL if is_alike and name in shared}
            own = {
                "own": state.per_rank_state(parts, models),
                "sums": hashlib.sha256(json.dumps(sums.tolist()).encode()).hexdigest(),
                "unreported": asdict(unreported),
            }
            if self._comm.rank == 0:
                own |= {"state": shared, "about": json.dumps(self._metadata_at(position))}
            return own, equal

        is_taken = self._snapshots.take(position.step, documents)
        self._wait_for_rank_0()  # and for the others: now it is whole
        if is_taken and self._comm.rank == 0:
            exits.report(snapshot=str(position.step))

    def _metadata_at(self, position: Position) -> dict[str, Any]:
        layout = {"parts": self._comm.replica.size, **self.parts.where.metadata}
        return {"position": asdict(position), **self._metadata, "tracker": self.run.tracker.memory(), **layout}

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        self.run.watch.begin_checkpoint(position.step)
        best = self.step.task.best
        if self.run.tracker.is_best(done.test):
            self.save_best(position, **{f"eval_{best}": done.test[best]})

    def trained(self, position: Position) -> None:
        self._save_timed(position)
        self.wait(position.step)

    def _record_commit(self, step: int) -> None:
        self._written_step = step
        exits.report(checkpoint=str(step))

    def _save_timed(self, position: Position) -> float:
        """Take a checkpoint; record and return the seconds for which it held the training."""
        began_s = time.perf_counter()
        self.save(position)
        held_s = time.perf_counter() - began_s
        self.run.tracker.record_save(held_s)
        return held_s

    def save(self, position: Position) -> None:
        """Take a checkpoint, at most one per step within an epoch, once the previous one is written.

        Training waits for the ranks' files and a copy of the shared state. Raises EndOfRun on all ranks if replicas
        differ.
        """
        # After the test of an epoch the position is another one, though the step is the same.
        if position.visited and position.step == self._taken_step and self.wait(position.step):
            return
        self._taken_step = position.step
        check_replicas(self._comm, self.parts.where, self.parts.model, position.step)
        parts = replace(self.parts, optimizer=self.parts.how.whole(self.parts.optimizer))
        rank_state = copy_to_host(state.per_rank_state(parts))
        content = files.pack(files.rank_file_name(self._comm.rank), rank_state)
        ranks, failed = self._write_rank_files(position.step, content)
        if failed:  # retry once, like the writer
            if self._writer is not None:
                self._writer.make_room(failed)
            ranks, failed = self._write_rank_files(position.step, content)
        self._count += 1
        if self._writer is not None:
            if failed:
                self._writer.note_failure(position.step, failed)
            else:
                metadata = self._metadata_at(position)
                commit = partial(files.commit, files.part_folder(self._folder, position.step), ranks=ranks)
                self._writer.submit("step", position.step, commit, {"state": state.shared_state(parts)}, metadata)
        self.run.faults.inflict_at("save", self._count)
        self._wait_for_rank_0()

    def _write_rank_files(self, step: int, content: memoryview) -> tuple[dict[int, Fingerprint], OSError | None]:
        """Write each rank's own file; return the fingerprints on rank 0, and the first error on all ranks."""

        def begin() -> None:
            if self._writer is not None:
                self._hold()
                self._writer.wait()
                files.begin(self._folder, step)

        _, failed = _try_write(begin)
        failed = self._comm.allgather(failed)[0]
        if failed:
            return {}, OSError(*failed)

        part, rank, apart = files.part_folder(self._folder, step), self._comm.rank, self._run_folder.apart
        sent = self._comm.gather(bytes(content) if rank in apart else b"") if apart else []
        contents = {number: memoryview(one) for number, one in enumerate(sent) if one}
        contents |= {} if rank in apart else {rank: content}

        def write() -> dict[int, Any]:
            return {number: asdict(files.write_rank_file(part, number, one)) for number, one in contents.items()}

        written, failed = _try_write(write, source=f"rank {rank} on {socket.gethostname()}: " if rank > 0 else "")
        answers = [json.loads(answer) for answer in self._comm.gather(json.dumps([written, failed]).encode())]
        failed = self._comm.allgather(next((error for _, error in answers if error), None))[0]
        fingerprints = {
            int(number): Fingerprint(**fields) for written, _ in answers for number, fields in (written or {}).items()
        }
        return fingerprints, OSError(*failed) if failed else None

    def _hold(self) -> None:
        """Make sure that the run folder is still this run's; raise OSError if it is not."""
        if self._run_folder.lock is not None:
            hold_again(self._run_folder.path, self._run_folder.lock)

    def save_best(self, position: Position, **metrics: float) -> None:
        """Keep the evaluated weights with their metrics, separately from the checkpoints."""
        weights = self.parts.where.part.gather_full(self._comm, self.step.evaluated)
        _, failed = _try_write(self._hold)
        if self._writer is not None and failed:
            self._writer.note_failure(position.step, OSError(*failed))
        elif self._writer is not None:
            metadata = {**metrics, "epoch": position.epoch + 1}
            write = partial(files.write, self._folder, position.step, kind="best")
            self._writer.submit("best", position.step, write, {"weights": weights}, metadata)
        self._wait_for_rank_0()

    def _wait_for_rank_0(self) -> None:
        """Wait while the time limit of saving still applies: the next step's is shorter."""
        self._comm.allgather(None)

    def wait(self, step: int) -> bool:
        """Wait for the writer; return whether the newest checkpoint that it has written is of this step."""
        if self._writer is not None:
            self._writer.wait()
        return bool(self._comm.allgather(self._written_step)[0] == step)

    def end_run(self, position: Position) -> NoReturn:
        """End with status 0 if the run can resume from here, else with status 1."""
        if not self._can_resume(position.step):  # what was written may be gone
            self._taken_step = None
            self.save(position)
        if self._can_resume(position.step):
            named = self._metadata.get("config", {}).get("run") or ""  # perhaps EXPERIMENT/NAME
            run = named[: named.rfind("/") + 1] + self._run_folder.path.name
            line = f"saved at step {position.step}. To resume, run the same command again with --run {run}."
            raise Preempted(line, status=0, reason="preempted")
        raise EndOfRun(
            "stop requested, but the checkpoint could not be written: progress since the last one is lost.",
            status=exits.FAILED,
            reason="failed",
        )

    def _can_resume(self, step: int) -> bool:
        return self.wait(step) and bool(self._comm.allgather(files.can_resume(self._folder, step))[0])


def _try_write(write: Callable[[], T], *, source: str = "") -> tuple[T | None, list[Any] | None]:
    """Return the result of `write`, or number and text of its OSError as JSON."""
    try:
        return write(), None
    except OSError as error:
        return None, [error.errno, f"{source}{error.strerror or error}"]


def resume(parts: State, checkpoint: files.StoredCheckpoint, *, apart: Collection[int] = ()) -> Position:
    """Restore a training from a checkpoint, and return its position.

    Rank 0 reads the shared state and broadcasts it; each rank reads its own file and that of its part. If the number of
    ranks or the parts have changed, rank 0 reads the ranks' files one by one, and each rank those of all parts. Ranks
    that are `apart` do not see the checkpoint: rank 0 reads for them. Raises BadInput if the checkpoint cannot be read.
    The settings were compared with the checkpoint before the folder was opened.
    """
    position, comm = Position(**checkpoint.metadata["position"]), parts.comm
    saved_parts = checkpoint.metadata.get("parts", 1)

    def mean() -> bytes:
        rank_states = (files.load(checkpoint, files.rank_file_name(rank)) for rank in checkpoint.ranks)
        return bytes(files.pack("mean", state.average_state(rank_states)))

    def load(rank: int) -> files.Document:
        name = files.rank_file_name(rank)
        return files.unpack(checkpoint, name, sent[rank]) if rank in sent else files.load(checkpoint, name)

    def bring_back() -> None:
        rank_state = load(comm.rank) if is_same else files.unpack(checkpoint, "mean", averaged)
        saved = files.unpack(checkpoint, "state", shared_content)
        if saved_parts > 1:
            saved |= state.join_parts(map(load, saved_here), parts, fits=fits)
        elif comm.replica.size > 1:
            saved |= state.join_parts([state.as_part(saved)], parts, fits=False)
        state.restore(parts, saved, rank_state, step=position.step)

    layout = {"parts": comm.replica.size, **parts.where.metadata}
    fits = all(checkpoint.metadata.get(name) == value for name, value in layout.items())
    is_same = checkpoint.is_complete_for(comm.size) and fits
    saved_here = [comm.replica.rank] if fits else range(saved_parts)  # parts of which this rank needs something
    needed = {*([comm.rank] if is_same else ()), *(saved_here if saved_parts > 1 else ())}
    sent = _send_apart(comm, checkpoint, needed, apart)
    shared_content = _broadcast(comm, lambda: files.read(checkpoint, "state"))
    averaged = b"" if is_same else _broadcast(comm, lambda: _require_fit(checkpoint, mean))
    agree(comm, lambda: _require_fit(checkpoint, bring_back))
    return position


def _send_apart(
    comm: Comm, checkpoint: files.StoredCheckpoint, needed: Collection[int], apart: Collection[int]
) -> dict[int, bytes]:
    """Return the rank files that a rank needs, by their rank, where it is apart: rank 0 reads them."""
    here = set(needed) if comm.rank in apart else set()
    sent = dict[int, bytes]()
    for rank in sorted({rank for ranks in comm.allgather(sorted(here)) for rank in ranks} if apart else ()):
        content = _broadcast(comm, partial(files.read, checkpoint, files.rank_file_name(rank)))
        sent |= {rank: content} if rank in here else {}
    return sent


def _broadcast(comm: Comm, read: Callable[[], bytes]) -> bytes:
    """Broadcast what rank 0 reads; BadInput on all ranks if it cannot."""
    return comm.broadcast(agree(comm, lambda: read() if comm.rank == 0 else b""))


def _require_fit(checkpoint: files.StoredCheckpoint, use: Callable[[], T]) -> T:
    """Return the result of `use`; BadInput if the checkpoint is intact but incompatible."""
    try:
        return use()
    except Exception as error:
        if isinstance(error, BadInput) or is_out_of_memory(error):
            raise
        raise BadInput(
            f"{checkpoint.folder}: does not fit this run ({type(error).__name__}). Choose another --run to start "
            "from scratch."
        ) from error
