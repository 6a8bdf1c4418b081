"""The checkpoints of a run: made by all ranks together, written by rank 0 while they train on."""

from dataclasses import asdict
from pathlib import Path

import torch

from hvdtrain.checkpoint import changes as differences
from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint import state
from hvdtrain.ranks.comm import Comm, agreed
from hvdtrain.record.tracker import Tracker
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.guard import is_out_of_memory
from hvdtrain.train import divergence
from hvdtrain.train.loop import Position
from hvdtrain.train.reports import Totals
from hvdtrain.train.training import Training


class Saves:
    """Takes checkpoints; all ranks call its methods together."""

    def __init__(
        self,
        comm: Comm,
        training: Training,
        tracker: Tracker,
        folder: Path,
        *,
        keep: int,
        newest: int | None,
        faults: Faults = NONE,
    ) -> None:
        """`newest` is the step of the checkpoint that this run goes on from, if it does."""
        self._comm = comm
        self._training = training
        self._tracker = tracker
        self._faults = faults
        self._count = 0
        self._taken = self._written = newest
        self._writer = None
        if comm.rank == 0:
            self._writer = checkpoint.Writer(folder, keep=keep, guard=tracker.guard, committed=self._committed)
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
        training = self._training
        divergence.check_replicas(self._comm, training.step.model, position.step)
        everyones = self._comm.collect(state.own(training))
        self._count += 1
        if self._writer is not None:
            self._hand_over(position, everyones)
        self._faults.at("save", self._count)
        self._wait_for_rank_0()

    def _hand_over(self, position: Position, everyones: list[bytes]) -> None:
        assert self._writer is not None
        training = self._training
        about = {
            "position": asdict(position),
            "np": self._comm.size,
            "global_batch": training.global_batch,
            "images": len(training.images.train),
            "config": differences.as_json(asdict(training.config)),
            "tracker": self._tracker.memory(),
        }
        ranks = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in everyones]
        self._writer.save(position.step, {"state": state.shared(training), "ranks": ranks}, about)

    def save_best(self, position: Position, accuracy: float) -> None:
        """Keep the weights that were evaluated, apart from the checkpoints."""
        if self._writer is not None:
            weights = self._training.evaluated.state_dict()
            about = {"eval_accuracy": accuracy, "epoch": position.epoch + 1}
            self._writer.save_best(position.step, {"weights": weights}, about)
        self._wait_for_rank_0()

    def _wait_for_rank_0(self) -> None:
        """While the others still have the time limit of saving: their next step's is shorter."""
        self._comm.gather(None)

    def wait(self, step: int) -> bool:
        """Wait for the writer; whether the newest checkpoint on disk is now of this step."""
        if self._writer is not None:
            self._writer.wait()
        return bool(self._comm.gather(self._written)[0] == step)


def resume(comm: Comm, training: Training, found: checkpoint.Found) -> tuple[Position, list[str]]:
    """Bring training back to a checkpoint; where it stands, and what is not as it was, one line each.

    Raises BadInput where the checkpoint cannot be read. That the settings fit was seen before the folder was opened.
    """
    images, settings = len(training.images.train), differences.as_json(asdict(training.config))
    lines = differences.changed(found.about, settings, training_images=images)
    known = found.about["position"]
    position = Position(**{**known, "totals": Totals(**known["totals"])})
    if found.about["np"] != comm.size:
        kept = "global batch" if training.config.global_batch_size else "batch per rank"
        ranks = f"{comm.size} rank{'s' if comm.size > 1 else ''} in place of {found.about['np']}"
        batch = f"{training.global_batch} images per step in place of {found.about['global_batch']}"
        lines.append(f"{ranks}: the {kept} is kept, {batch}; random numbers are new ones")

    def bring_back() -> None:
        content = {name: checkpoint.load(found, name, map_location="cpu") for name in ("state", "ranks")}
        try:
            state.restore(training, content["state"], content["ranks"], step=position.step)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BadInput(
                f"{found.folder} does not fit this run ({type(error).__name__}): give --resume never to start anew"
            ) from error

    agreed(comm, bring_back)
    return position, lines
