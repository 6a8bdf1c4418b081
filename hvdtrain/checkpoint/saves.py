"""The checkpoints of a run: made by all ranks together, written by rank 0 while they train on."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from hvdtrain.checkpoint import files, state
from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.run_folder import RunFolder
from hvdtrain.checkpoint.state import State
from hvdtrain.checkpoint.writer import Writer
from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.replicas import check_replicas
from hvdtrain.record.run import Run
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput, EndOfRun
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.guard import Guard, is_out_of_memory


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
        faults: Faults = NONE,
    ) -> None:
        """Save these parts of a training into `folder`, and say in each manifest what it is `about`, see `changes`.

        `memory` is what the tracker must know to go on from a checkpoint, `guard` counts what cannot be written, `keep`
        is how many to keep, and `newest` the step of the checkpoint that this run goes on from, if it does.
        """
        self._parts = parts
        self._comm = parts.comm
        self._about = about
        self._memory = memory
        self._faults = faults
        self._count = 0
        self._taken = self._written = newest
        self._writer = None
        if self._comm.rank == 0:
            self._writer = Writer(folder, keep=keep, guard=guard, committed=self._committed)
            if newest is not None:
                exits.report(checkpoint=str(newest))

    def _committed(self, step: int) -> None:
        self._written = step
        exits.report(checkpoint=str(step))

    def save(self, position: Position) -> None:
        """Take a checkpoint, once for each step; training waits for the copy, and for the writer if it is busy.

        Raises EndOfRun on all ranks where replicas differ.
        """
        if position.step == self._taken and self.wait(position.step):
            return
        self._taken = position.step
        check_replicas(self._comm.data, self._parts.model, position.step)
        contents = self._comm.gather(state.own(self._parts))
        self._count += 1
        if self._writer is not None:
            about = {"position": asdict(position), **self._about, "tracker": self._memory()}
            ranks = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
            self._writer.save(position.step, {"state": state.shared(self._parts), "ranks": ranks}, about)
        self._faults.at("save", self._count)
        self._wait_for_rank_0()

    def save_best(self, position: Position, weights: torch.nn.Module, **metrics: float) -> None:
        """Keep the weights that were evaluated, apart from the checkpoints, with their metrics."""
        if self._writer is not None:
            about = {**metrics, "epoch": position.epoch + 1}
            self._writer.save_best(position.step, {"weights": weights.state_dict()}, about)
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


def resume(parts: State, found: files.Found) -> Position:
    """Bring a training back to a checkpoint: where it stands.

    Raises BadInput where the checkpoint cannot be read. That the settings fit was seen before the folder was opened.
    """
    position = Position(**found.about["position"])

    def bring_back() -> None:
        content = {name: files.load(found, name, map_location="cpu") for name in ("state", "ranks")}
        try:
            state.restore(parts, content["state"], content["ranks"], step=position.step)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BadInput(
                f"{found.folder} does not fit this run ({type(error).__name__}): give --resume never to start anew"
            ) from error

    agreed(parts.comm, bring_back)
    return position


def saves_of(run: Run, folder: RunFolder, parts: State, *, keep: int) -> Saves:
    """The checkpoints of an open run, which goes on from the one in `folder` if there is one."""
    return Saves(
        parts,
        folder.path / "checkpoints",
        about=folder.about,
        memory=run.tracker.memory,
        guard=run.tracker.guard,
        keep=keep,
        newest=None if folder.resume_from is None else folder.resume_from.step,
        faults=run.faults,
    )
