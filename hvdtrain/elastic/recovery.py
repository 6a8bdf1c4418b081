"""From a loss to the next step: the ranks that are left close up, agree on where they stand, and go on.

A step is either applied on a rank or not, since its sums come before anything changes. So each rank holds the last step
that it has completed. Where that is not the same one, because a sum came through to some before a rank died, the rank
that is furthest gives the others its state.
"""

import io
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn, Protocol

import torch

from hvdtrain.checkpoint import files, folder, state
from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.checkpoint.state import State
from hvdtrain.elastic import stopped
from hvdtrain.elastic.comm import ElasticComm, Member
from hvdtrain.elastic.progress import Progress
from hvdtrain.ranks import replicas
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.record.run import Run
from hvdtrain.safety import exits
from hvdtrain.safety.exits import FAILED, EndOfRun

# From a loss to the next step, on any number of ranks; then all of them end, and the run may be started again.
LIMIT_S = 20.0


class Recovery(Protocol):
    """What the loop does when a rank is lost."""

    losses: tuple[type[Exception], ...]  # what it catches

    def close_up(self) -> Position:
        """Be one of fewer ranks that all stand where the furthest of them stood; EndOfRun where they are too few.

        All ranks that are left call it when they catch one of `losses`. Where it takes longer than LIMIT_S, all of them
        end.
        """

    def settle(self, meet: Callable[[], None]) -> None:
        """Meet anew before the next step, if ranks were lost; another may be lost in it."""


class _Off:
    losses: tuple[type[Exception], ...] = ()

    def settle(self, meet: Callable[[], None]) -> None:
        pass

    def close_up(self) -> Position:
        raise AssertionError("nothing was caught")


OFF: Recovery = _Off()


class Survivors:
    """The ranks of an elastic run."""

    def __init__(
        self,
        comm: ElasticComm,
        parts: State,
        sync: BucketSync,
        progress: Progress,
        *,
        undo: Callable[[], None],
        saves: Saves,
        run: Run,
        min_np: int,
        hang_timeout_s: float | None,
    ) -> None:
        """`undo` brings this rank back to its last completed step; with fewer ranks than `min_np` the run ends.

        A rank of this host that is stopped ends after half of the timeout of a step, 10 s if not given.
        """
        self.losses = comm.losses
        self._comm, self._parts, self._sync, self._progress = comm, parts, sync, progress
        self._undo, self._saves, self._run, self._min_np = undo, saves, run, min_np
        self._locks: list[int] = []
        self._unsettled = False
        self._times = 0  # that this rank has closed up, or begun to
        if hang_timeout_s != 0:
            here = [one.pid for one in comm.members if one.host == comm.me.host and one != comm.me]
            stopped.watch(here, limit_s=stopped.LIMIT_S if hang_timeout_s is None else hang_timeout_s / 2)
        exits.end_by(_kill)
        exits.never_finalize()

    def close_up(self) -> Position:
        began_s = time.monotonic()
        comm, run = self._comm, self._run
        run.watch.recovering(self._progress.position.step)
        limit = threading.Timer(LIMIT_S, self._give_up)
        limit.daemon = True
        limit.start()
        self._undo()
        here = self._standing()
        self._times += 1
        lost: list[Member] = []
        while True:
            try:
                lost += comm.close_up()
                run.faults.at("recover", self._times)
                here, position, counts = self._agree(here)
                replicas.check_replicas(comm, self._parts.model, position.step)
                comm.meet()
                break
            except self.losses:  # another one
                continue
        limit.cancel()
        if not lost:
            raise EndOfRun("sums failed though no rank was lost", status=FAILED, reason="failed")
        run.tracker.go_on_from(here["tracker"])
        run.tracker.count(position.step, counts)
        self._sync.begin_anew(comm.size)
        self._lead()
        self._tell(lost, position, took_s=time.monotonic() - began_s)
        self._unsettled = True
        if comm.size < self._min_np:
            self._saves.save(position)
            self._saves.wait(position.step)
            left = "1 rank is" if comm.size == 1 else f"{comm.size} ranks are"
            raise EndOfRun(
                f"{left} left, fewer than --min-np {self._min_np}: start it again, and it goes on from step "
                f"{position.step}",
                status=FAILED,
                reason="too few ranks",
            )
        return position

    def settle(self, meet: Callable[[], None]) -> None:
        if self._unsettled:
            meet()
            self._unsettled = False

    def _standing(self) -> dict[str, Any]:
        """Where this rank stands, as JSON."""
        progress = self._progress
        return {
            "position": asdict(progress.stopped()),
            "reported": progress.reported,
            "unreported": asdict(progress.unreported()),
            "tracker": self._run.tracker.counted(),
            "small": {name: part.state_dict() for name, part in self._small().items()},
        }

    def _small(self) -> Mapping[str, state.Stateful]:
        """Parts that all ranks have alike, and that are a few numbers."""
        return {**self._parts.shared, "sync": self._sync}

    def _agree(self, here: dict[str, Any]) -> tuple[dict[str, Any], Position, dict[str, int]]:
        """Take over the state of the furthest rank: this one's standing then, where all stand, and what is counted."""
        comm, parts = self._comm, self._parts
        of_all = comm.allgather(here)
        furthest = max(range(comm.size), key=lambda rank: (*_place(of_all[rank]), -rank))
        there = of_all[furthest]
        steps = [one["position"]["step"] for one in of_all]
        if min(steps) < max(steps):
            whole = bytes(files.pack("state", state.shared(parts))) if comm.rank == furthest else b""
            whole = comm.broadcast(whole, root=furthest)
            if here["position"]["step"] < there["position"]["step"]:
                saved = torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True)
                state.restore_shared(parts, saved)
        for name, part in self._small().items():
            if there["small"][name]:
                part.load_state_dict(there["small"][name])
        # Who has not reported what others have was in their report all the same.
        untold = [one["unreported"] for one in of_all if one["reported"] == there["reported"]]
        totals = Counter[str](there["position"]["totals"])
        for one in untold:
            totals.update(one["totals"])
        unit = self._run.tracker.measures.unit
        counts = {
            "skipped_steps": max(one["skipped_steps"] for one in untold),
            "loss_spikes": sum(one["loss_spikes"] for one in untold),
            f"unreadable_{unit}": sum(one["unreadable"] for one in untold),
        }
        position = replace(Position(**there["position"]), totals=dict(totals))
        return {**there, "unreported": here["unreported"], "reported": here["reported"]}, position, counts

    def _lead(self) -> None:
        """The lowest rank does from now on what rank 0 has done."""
        if self._comm.rank == 0 and not self._run.tracker.writes:
            self._run.lead()
            self._locks += folder.taken_over(self._run.folder)
        self._saves.go_on(np=self._comm.size)

    def _tell(self, lost: list[Member], position: Position, *, took_s: float) -> None:
        self._run.tracker.count(position.step, {"lost_ranks": len(lost), "recoveries": 1})
        if self._comm.rank > 0:
            return
        event = {
            "event": "lost",
            "step": position.step,
            "ranks": [one.launched for one in lost],
            "hosts": sorted({one.host for one in lost}),
            "np": self._comm.size,
            "recovery_s": round(took_s, 3),
        }
        self._run.tracker.happened(event, {"elastic/np": self._comm.size, "elastic/recovery_s": took_s})
        self._run.console.events([event])

    def _give_up(self) -> None:
        print(
            f"hvdtrain: {socket.gethostname()}: ranks were lost, and those that are left have not closed up in "
            f"{LIMIT_S:.0f} s: all of them end",
            file=sys.stderr,
            flush=True,
        )
        self._comm.abort(FAILED)


def _place(standing: Mapping[str, Any]) -> tuple[int, int, int]:
    """How far a rank has come."""
    position = standing["position"]
    return position["step"], position["epoch"], standing["reported"]


def _kill(_: int) -> NoReturn:
    """End this process by a signal: of a status mpirun does not tell the ranks that are left."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
