"""From a loss to the next step: the ranks that are left close up, agree on where they stand, and go on.

A step is either applied on a rank or not, since its sums come before anything changes. So each rank holds the last step
that it has completed. Where that is not the same one, because a sum came through to some before a rank died, the rank
that is furthest gives the others its state.
"""

import io
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch

from hvdtrain.checkpoint import files, folder, state
from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.checkpoint.state import State
from hvdtrain.elastic import stopped
from hvdtrain.elastic.comm import ElasticComm, Member
from hvdtrain.elastic.newcomers import Newcomers, wait_to_join
from hvdtrain.elastic.progress import Progress, Unreported
from hvdtrain.ranks import replicas
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.safety import exits
from hvdtrain.safety.exits import FAILED, EndOfRun
from hvdtrain.tracking.run import Run

# From a loss to the next step, on any number of ranks; then all of them end, and the run may be started again.
LIMIT_S = 20.0

Standing = dict[str, Any]  # of a rank, as JSON; None of a newcomer, who has nothing yet


class Grows(Exception):  # noqa: N818 (no error: all ranks raise it at the end of the same step)
    """Newcomers are ready: all that are there take them in. For a newcomer its text is where to join."""


class Recovery(Protocol):
    """What the loop does when there are other ranks: some are lost, or some join."""

    changes: tuple[type[Exception], ...]  # what it catches
    newcomers: threading.Event | None  # set on rank 0 when some are ready

    def go_on(self, change: Exception) -> Position:
        """Be one of those who are there now, who all stand where the furthest of them stood.

        EndOfRun where they are too few. All that are there call it when they catch one of `changes`. Where it takes
        longer than LIMIT_S, all of them end.
        """

    def settle(self, meet: Callable[[], None]) -> None:
        """Meet anew before the next step, if there are other ranks; one may be lost in it. A newcomer joins here."""


class _Off:
    changes: tuple[type[Exception], ...] = ()
    newcomers: threading.Event | None = None

    def settle(self, meet: Callable[[], None]) -> None:
        pass

    def go_on(self, change: Exception) -> Position:
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
        grow: bool,
        min_np: int,
        hang_timeout_s: float | None,
    ) -> None:
        """`undo` brings this rank back to its last completed step; with fewer ranks than `min_np` the run ends.

        Where it may `grow`, newcomers are invited for ranks that were lost. A rank of this host that is stopped ends
        after half of the timeout of a step, 10 s if not given.
        """
        self.changes = (*comm.losses, Grows)
        self._comm, self._parts, self._sync, self._progress = comm, parts, sync, progress
        self._undo, self._saves, self._run, self._min_np = undo, saves, run, min_np
        self._locks: list[int] = []
        self._unsettled = False
        self._newcomers = Newcomers(comm.losses, say)
        self.newcomers = self._newcomers.ready if grow else None
        self._stopped = None
        self._times = 0  # that this rank has closed up, or begun to
        if hang_timeout_s != 0:
            limit_s = stopped.LIMIT_S if hang_timeout_s is None else hang_timeout_s / 2
            self._stopped = stopped.watch(self._neighbours(), limit_s=limit_s)
        exits.end_by(exits.kill)
        exits.never_finalize()

    def _neighbours(self) -> list[int]:
        """Process ids of the other ranks of this host."""
        me = self._comm.me
        return [one.pid for one in self._comm.members if one.host == me.host and one != me]

    def go_on(self, change: Exception) -> Position:
        began_s = time.monotonic()
        comm, run = self._comm, self._run
        become = comm.close_up
        if isinstance(change, Grows):
            become = partial(comm.join, str(change)) if comm.invitation else partial(comm.take_in, self._newcomers)
        run.watch.recovering(self._progress.position.step)
        limit = threading.Timer(LIMIT_S, self._give_up)
        limit.daemon = True
        limit.start()
        self._undo()
        here = None if comm.invitation else self._standing()
        self._times += 1
        try:
            here, position, counts = self._become(here, become)
        finally:
            limit.cancel()
        before = [Member(**one) for one in here["members"]]
        lost = [one for one in before if one not in comm.members]
        joined = [one for one in comm.members if one not in before]
        if not (lost or joined or isinstance(change, Grows)):
            raise EndOfRun(f"sums failed though no rank was lost: {change}", status=FAILED, reason="failed")
        run.tracker.go_on_from(here["tracker"])
        run.tracker.count(position.step, counts)
        self._sync.begin_anew(comm.size)
        if self._stopped is not None:
            self._stopped.follow(self._neighbours())
        self._lead()
        self._tell(lost, joined, position, took_s=time.monotonic() - began_s)
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
        if self.newcomers is not None and comm.rank == 0:
            self._newcomers.invite(lambda: comm.missing(run.folder))
        return position

    def _become(self, here: Standing | None, become: Callable[[], None]) -> tuple[Standing, Position, dict[str, int]]:
        """Be one of those who are there, by `become` at first; see `_agree`."""
        comm = self._comm
        while True:
            try:
                become()
                self._run.faults.at("recover", self._times)
                here, position, counts = self._agree(here)
                replicas.check_replicas(comm, self._parts.model, position.step)
                comm.meet()
            except comm.losses:
                if comm.invitation:
                    exits.kill(FAILED)
                become = comm.close_up
                continue
            return here, position, counts

    def settle(self, meet: Callable[[], None]) -> None:
        if self._comm.invitation:
            raise Grows(wait_to_join(self._comm.losses, self._comm.invitation.by))
        if self._unsettled:
            meet()
            self._unsettled = False

    def _standing(self) -> Standing:
        """Where this rank stands, as JSON."""
        progress = self._progress
        return {
            "position": asdict(progress.stopped()),
            "reported": progress.reported,
            "unreported": asdict(progress.unreported()),
            "tracker": self._run.tracker.counted(),
            "members": [asdict(one) for one in self._comm.members],
            "small": {name: part.state_dict() for name, part in self._small().items()},
        }

    def _small(self) -> Mapping[str, state.Stateful]:
        """Parts that all ranks have alike, and that are a few numbers."""
        return {**self._parts.shared, "sync": self._sync}

    def _agree(self, here: Standing | None) -> tuple[Standing, Position, dict[str, int]]:
        """Take over the state of the furthest rank: this one's standing then, where all stand, and what is counted.

        A newcomer stands nowhere, and takes the running statistics of that rank, too.
        """
        comm, parts = self._comm, self._parts
        of_all: list[Standing | None] = comm.allgather(here)
        stands = {rank: one for rank, one in enumerate(of_all) if one is not None}
        if not stands:
            exits.kill(FAILED)  # only newcomers are left
        furthest = max(stands, key=lambda rank: (*_place(stands[rank]), -rank))
        there = stands[furthest]
        steps = [one["position"]["step"] for one in stands.values()]
        if len(stands) < comm.size or min(steps) < max(steps):
            own = {"buffers": [dict(model.named_buffers()) for model in parts.models]}
            whole = bytes(files.pack("state", {**state.shared(parts), **own})) if comm.rank == furthest else b""
            whole = comm.broadcast(whole, root=furthest)
            if here is None or here["position"]["step"] < there["position"]["step"]:
                saved = torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True)
                state.restore_shared(parts, saved)
                if here is None:
                    state.restore_buffers(parts, saved["buffers"])
        for name, part in self._small().items():
            if there["small"][name]:
                part.load_state_dict(there["small"][name])
        # Who has not reported what others have was in their report all the same.
        untold = [one["unreported"] for one in stands.values() if one["reported"] == there["reported"]]
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
        mine = asdict(Unreported())  # of what others have reported nothing is left, also where they are lost meanwhile
        if here is not None and here["reported"] == there["reported"]:
            mine = here["unreported"]
        return {**there, "unreported": mine}, position, counts

    def _lead(self) -> None:
        """The lowest rank does from now on what rank 0 has done."""
        if self._comm.rank == 0 and not self._run.tracker.writes:
            self._run.lead()
            self._locks += folder.taken_over(self._run.folder)
        self._saves.go_on(np=self._comm.size)

    def _tell(self, lost: list[Member], joined: list[Member], position: Position, *, took_s: float) -> None:
        counts = {"lost_ranks": len(lost), "joined_ranks": len(joined), "recoveries": int(bool(lost))}
        self._run.tracker.count(position.step, counts)
        if self._comm.rank > 0:
            return
        for what, who in (("lost", lost), ("joined", joined)):
            if not who:
                continue
            event = {
                "event": what,
                "step": position.step,
                "ranks": [one.number for one in who],
                "hosts": sorted({one.host for one in who}),
                "np": self._comm.size,
                "recovery_s": round(took_s, 3),
            } | ({"in_place_of": [one.place for one in who]} if what == "joined" else {})
            self._run.tracker.happened(event, {"elastic/np": self._comm.size, "elastic/recovery_s": took_s})
            self._run.console.events([event])

    def _give_up(self) -> None:
        host = socket.gethostname()
        exits.be_shown()  # of those that are left none may lead yet
        say(f"{host}: ranks were lost, and those that are left have not closed up in {LIMIT_S:.0f} s: all of them end")
        self._comm.abort(FAILED)


def _place(standing: Standing) -> tuple[int, int]:
    """How far a rank has come.

    Whether it has ended the epoch does not count: all end it again where the lowest rank, which records it, has not.
    """
    return standing["position"]["step"], standing["reported"]


def say(line: str) -> None:
    """On standard error, from any thread."""
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
