"""Recovery from a loss: the remaining ranks shrink the communicator, agree on a position, and continue.

A step is applied on a rank completely or not at all, since its sums come before any change. Each rank therefore holds
its last completed step. If these differ, because a sum completed on some ranks before another rank died, the rank that
is furthest sends its state to the others.
"""

import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from hvdtrain.checkpoint import files, folder, state
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.core.position import Position
from hvdtrain.core.replicas import check_replicas
from hvdtrain.insight.tracking.run import TrackedRun
from hvdtrain.loop.loop import Membership
from hvdtrain.loop.progress import Progress, Unreported
from hvdtrain.loop.save_points import Decision
from hvdtrain.parallel.elastic import stopped
from hvdtrain.parallel.elastic.comm import ElasticComm, Member
from hvdtrain.parallel.elastic.newcomers import Newcomers, wait_to_join
from hvdtrain.parallel.elastic.undo import Undo
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import FAILED, EndOfRun

# Limit of a recovery, for any number of ranks; then all ranks end, and the run may be restarted.
LIMIT_S = 20.0

Standing = dict[str, Any]  # position of a rank as JSON; None for a newcomer


class RanksJoin(Exception):  # noqa: N818 (no error: all ranks raise it at the end of the same step)
    """Newcomers are ready: the current ranks admit them. For a newcomer the text is the port at which it joins."""


def survivors(saves: Saves, progress: Progress, *, grow: bool, min_np: int, hang_timeout_s: float | None) -> Membership:
    """Return the membership of the training that `saves` saves, elastic if there are several ranks."""
    step = saves.step
    if not isinstance(step.slots.comm, ElasticComm) or not isinstance(step.slots.how, BucketSync):
        return Membership()
    undo = Undo()
    step.slots.witnesses.insert(0, undo)
    return Survivors(
        step.slots.comm,
        step.slots.how,
        saves,
        progress,
        undo=partial(undo.undo, step),
        grow=grow,
        min_np=min_np,
        hang_timeout_s=hang_timeout_s,
    )


class Survivors(Membership):
    """The ranks of an elastic run."""

    def __init__(
        self,
        comm: ElasticComm,
        sync: BucketSync,
        saves: Saves,
        progress: Progress,
        *,
        undo: Callable[[], None],
        grow: bool,
        min_np: int,
        hang_timeout_s: float | None,
    ) -> None:
        """Create the membership; `undo` restores this rank's last completed step.

        With fewer ranks than `min_np` the run ends. With `grow`, newcomers are invited for lost ranks. A stopped rank
        of this host is killed after half of a step's timeout, 10 s if not given.
        """
        self.changes = (*comm.loss_errors, RanksJoin)
        self._comm, self._parts, self._sync, self._progress = comm, saves.parts, sync, progress
        self._undo, self._saves, self._min_np = undo, saves, min_np
        self._run: TrackedRun = saves.run
        self._locks: list[int] = []
        self._needs_refresh = False
        self._newcomers = Newcomers(comm.loss_errors)
        self.newcomers = self._newcomers.ready if grow else None
        self._stopped = None
        self._recovery_count = 0  # recoveries of this rank, including one in progress
        if hang_timeout_s != 0:
            limit_s = stopped.LIMIT_S if hang_timeout_s is None else hang_timeout_s / 2
            self._stopped = stopped.watch_neighbours(self._neighbours(), limit_s=limit_s)
        exits.set_failure_exit(exits.kill_self)
        exits.skip_mpi_finalize()

    def _neighbours(self) -> list[int]:
        """Return the process ids of the other ranks of this host."""
        own_member = self._comm.own_member
        others = [member for member in self._comm.members if member != own_member]
        return [member.pid for member in others if member.host == own_member.host]

    def recover(self, change: Exception) -> Position:
        """Recover, see Membership; after LIMIT_S all ranks end."""
        began_s = time.monotonic()
        comm, run = self._comm, self._run
        change_members = comm.shrink
        if isinstance(change, RanksJoin):
            is_newcomer = comm.invitation is not None
            change_members = partial(comm.join, str(change)) if is_newcomer else partial(comm.admit, self._newcomers)
        run.watch.begin_recovery(self._progress.position.step)
        limit = threading.Timer(LIMIT_S, self._give_up)
        limit.daemon = True
        limit.start()
        self._undo()
        standing = None if comm.invitation else self._current_standing()
        self._recovery_count += 1
        try:
            standing, position, counts = self._regroup(standing, change_members)
        finally:
            limit.cancel()
        before = [Member(**fields) for fields in standing["members"]]
        lost = [member for member in before if member not in comm.members]
        joined = [member for member in comm.members if member not in before]
        if not (lost or joined or isinstance(change, RanksJoin)):
            raise EndOfRun(f"an all-reduce failed though no rank was lost: {change}", status=FAILED, reason="failed")
        run.tracker.adopt(standing["tracker"])
        run.tracker.add_counts(position.step, counts)
        self._sync.restart(comm.size)
        if self._stopped is not None:
            self._stopped.set_pids(self._neighbours())
        self._become_rank_zero()
        self._announce(lost, joined, position, took_s=time.monotonic() - began_s)
        self._needs_refresh = True
        if comm.size < self._min_np:
            self._saves.save(position)
            self._saves.wait(position.step)
            remaining = "1 rank is" if comm.size == 1 else f"{comm.size} ranks are"
            raise EndOfRun(
                f"{remaining} left, fewer than --min-np {self._min_np}. Run the same command again to resume from "
                f"step {position.step}.",
                status=FAILED,
                reason="too few ranks",
            )
        if self.newcomers is not None and comm.rank == 0:
            self._newcomers.invite(lambda: comm.make_invitations(run.folder))
        return position

    def _regroup(
        self, standing: Standing | None, change_members: Callable[[], None]
    ) -> tuple[Standing, Position, dict[str, int]]:
        """Become one of the remaining ranks, starting with `change_members`; see `_agree`."""
        comm = self._comm
        while True:
            try:
                change_members()
                self._run.faults.inflict_at("recover", self._recovery_count)
                standing, position, counts = self._agree(standing)
                check_replicas(comm, self._parts.where, self._parts.model, position.step)
                comm.barrier()
            except comm.loss_errors:
                if comm.invitation:
                    exits.kill_self(FAILED)
                change_members = comm.shrink
                continue
            return standing, position, counts

    def act_on(self, decision: Decision, position: Position) -> None:
        if decision.regroup:
            raise RanksJoin

    def finish(self, refresh: Callable[[], None]) -> None:
        if self._comm.invitation:
            raise RanksJoin(wait_to_join(self._comm.loss_errors, self._comm.invitation.parent_pid))
        if self._needs_refresh:
            refresh()
            self._needs_refresh = False

    def _current_standing(self) -> Standing:
        """Return the position and counts of this rank, as JSON."""
        progress = self._progress
        return {
            "position": asdict(progress.stopped()),
            "reported": progress.reported,
            "unreported": asdict(progress.unreported()),
            "tracker": self._run.tracker.shared_state(),
            "members": [asdict(member) for member in self._comm.members],
            "small": {name: part.state_dict() for name, part in self._small_parts().items()},
        }

    def _small_parts(self) -> Mapping[str, state.Stateful]:
        """Return the parts that are equal on all ranks and consist of a few numbers."""
        small = {name: part for name, part in self._parts.shared.items() if name != state.OWN}
        return {**small, "sync": self._sync}

    def _agree(self, standing: Standing | None) -> tuple[Standing, Position, dict[str, int]]:
        """Take over the state of the furthest rank; return this rank's standing, the common position, and the counts.

        A newcomer has no position, and also takes over the running statistics of that rank.
        """
        comm, parts = self._comm, self._parts
        gathered: list[Standing | None] = comm.allgather(standing)
        standings = {rank: each for rank, each in enumerate(gathered) if each is not None}
        if not standings:
            exits.kill_self(FAILED)  # only newcomers are left
        furthest = max(standings, key=lambda rank: (*_progress_key(standings[rank]), -rank))
        furthest_standing = standings[furthest]
        steps = [each["position"]["step"] for each in standings.values()]
        if len(standings) < comm.size or min(steps) < max(steps):
            content = b""
            if comm.rank == furthest:
                buffers = {"buffers": state.own_buffers(parts)}
                content = bytes(files.pack("state", {**state.shared_state(parts), **buffers}))
            content = comm.broadcast(content, root=furthest)
            if standing is None or standing["position"]["step"] < furthest_standing["position"]["step"]:
                saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                state.restore_shared(parts, saved)
                if standing is None:
                    state.restore_buffers(parts, saved["buffers"])
        for name, part in self._small_parts().items():
            if furthest_standing["small"][name]:
                part.load_state_dict(furthest_standing["small"][name])
        # A rank that missed a report was still counted in the report of the others.
        reported = furthest_standing["reported"]
        unreported = [each["unreported"] for each in standings.values() if each["reported"] == reported]
        totals = Counter[str](furthest_standing["position"]["totals"])
        for each in unreported:
            totals.update(each["totals"])
        unit = self._run.tracker.task.unit
        counts = {
            "skipped_steps": max(each["skipped_steps"] for each in unreported),
            "loss_spikes": sum(each["loss_spikes"] for each in unreported),
            f"unreadable_{unit}": sum(each["unreadable"] for each in unreported),
        }
        position = replace(Position(**furthest_standing["position"]), totals=dict(totals))
        # Reported steps are pending on no rank, even if another rank is lost meanwhile.
        own_unreported = asdict(Unreported())
        if standing is not None and standing["reported"] == reported:
            own_unreported = standing["unreported"]
        return {**furthest_standing, "unreported": own_unreported}, position, counts

    def _become_rank_zero(self) -> None:
        """Let the lowest rank take over the work of rank 0."""
        if self._comm.rank == 0 and not self._run.tracker.is_writer:
            self._run.become_rank_zero()
            self._locks += folder.lock_orphan(self._run.folder)
        self._saves.go_on(np=self._comm.size)

    def _announce(self, lost: list[Member], joined: list[Member], position: Position, *, took_s: float) -> None:
        counts = {"lost_ranks": len(lost), "joined_ranks": len(joined), "recoveries": int(bool(lost))}
        self._run.tracker.add_counts(position.step, counts)
        if self._comm.rank > 0:
            return
        for name, members in (("lost", lost), ("joined", joined)):
            if not members:
                continue
            event = {
                "event": name,
                "step": position.step,
                "ranks": [member.number for member in members],
                "hosts": sorted({member.host for member in members}),
                "np": self._comm.size,
                "recovery_s": round(took_s, 3),
            } | ({"in_place_of": [member.place for member in members]} if name == "joined" else {})
            self._run.tracker.record_event(event, {"elastic/np": self._comm.size, "elastic/recovery_s": took_s})
            self._run.console.print_events([event])

    def _give_up(self) -> None:
        host = socket.gethostname()
        exits.show_this_rank()  # there may be no rank 0 yet
        exits.print_message(
            "error", f"{host}: recovery did not finish within {LIMIT_S:.0f} s after a rank was lost; all ranks end."
        )
        self._comm.abort(FAILED)


def _progress_key(standing: Standing) -> tuple[int, int]:
    """Return a sort key for a rank's progress.

    The end of an epoch is not part of it: all ranks repeat it if the lowest rank, which records it, has not done it.
    """
    return standing["position"]["step"], standing["reported"]
