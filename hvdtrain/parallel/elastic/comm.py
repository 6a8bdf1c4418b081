"""A communicator that survives the loss of ranks, built on ULFM of Open MPI 5.

After a loss, the pending collectives of the other ranks fail, and all of them call `shrink`. It revokes the
communicator, so that no rank keeps waiting in it, and shrinks it to the remaining ranks in their old order; the lowest
of them becomes rank 0. All ranks call `admit` to let newcomers, which replace lost ranks, join as the last ranks.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hvdtrain.parallel.elastic.newcomers import Invitation, Newcomers, read_invitation
from hvdtrain.ranks import connect
from hvdtrain.ranks.comm import Comm, HorovodComm, loss_errors
from hvdtrain.settings.safety import calls, exits
from hvdtrain.settings.safety.exits import BadInput, EndOfRun

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# Wait before Horovod restarts: ranks often die together, and if one is lost during the restart, Horovod waits forever.
SETTLE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank with a permanent number; its rank changes as others are lost."""

    number: int  # its rank at launch, or for a newcomer a number that no other rank has had
    place: int  # its number, or for a newcomer that of the rank that it replaces
    host: str
    pid: int


class ElasticComm(HorovodComm):
    """All remaining ranks of a run, and those that have joined it."""

    def __init__(self, mpi: Any, facts: Mapping[str, Any], invitation: Invitation | None = None) -> None:
        """Connect to MPI's world; `facts` must be equal on this rank and on newcomers.

        Until it is admitted, a newcomer uses the number of its `invitation` as its rank among the launched ranks: it
        loads the same data as they did, and writes nothing that rank 0 writes.
        """
        super().__init__(mpi.Dup(), is_world=False)
        self.loss_errors = loss_errors()
        self.invitation = invitation  # until this newcomer is admitted
        self._facts = dict(facts)
        self._pending_sums: dict[Callable[[], Tensor], Tensor] = {}  # sums in flight, see _owner
        number, place = (self.rank, self.rank) if invitation is None else (invitation.number, invitation.place)
        self.own_member = Member(number=number, place=place, host=socket.gethostname(), pid=os.getpid())
        self._highest_number = number  # the highest number given so far
        self.members = self._members()
        self._hosts = [member.host for member in self.members]
        if invitation is not None:
            self._hosts = invitation.hosts
            self.rank, self.size = number, len(self._hosts)
            self.local_size = self.size  # all ranks are on one host

    def _members(self) -> list[Member]:
        """Return the members by rank."""
        gathered = self.allgather([self._highest_number, asdict(self.own_member)])
        self._highest_number = max(number for number, _ in gathered)
        return [Member(**fields) for _, fields in gathered]

    def make_invitations(self, run: Path) -> list[Invitation]:
        """Make invitations for the places of lost ranks, for a run in this folder."""
        taken_places = {member.place for member in self.members}
        places = [place for place in range(len(self._hosts)) if place not in taken_places]
        first = self._highest_number + 1
        self._highest_number += len(places)
        return [
            Invitation(
                number=number,
                place=place,
                hosts=self._hosts,
                run=str(run),
                facts=self._facts,
                parent_pid=self.own_member.pid,
            )
            for number, place in enumerate(places, start=first)
        ]

    def allgather(self, value: Any) -> list[Any]:
        return self._require_complete(lambda: super(ElasticComm, self).allgather(value))

    def gather(self, content: bytes) -> list[bytes]:
        return self._require_complete(lambda: super(ElasticComm, self).gather(content))

    def _require_complete(self, collect: Callable[[], T]) -> T:
        """Return the result; a result that cannot be read is a loss: Open MPI 5.0.11 may omit a lost rank's part."""
        try:
            return collect()
        except EndOfRun:
            raise
        except self.loss_errors:
            raise
        except Exception as error:
            raise self.loss_errors[0]("a collective came back torn") from error

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        received = self._require_complete(lambda: super(ElasticComm, self).broadcast(content, root))
        if len(set(self.allgather(hashlib.sha256(received).hexdigest()))) > 1:
            raise self.loss_errors[0]("a broadcast came back torn")
        return received

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        owner = _owner(values)
        wait = super().begin_sum(values, name)
        self._pending_sums[wait] = owner
        return partial(self._end_sum, wait)

    def _end_sum(self, wait: Callable[[], Tensor]) -> Tensor:
        total = wait()
        del self._pending_sums[wait]
        return total

    def shrink(self) -> None:
        """Shrink to the remaining ranks. Raises one of `loss_errors` at another loss meanwhile: call it again."""
        for wait in self._pending_sums:
            with suppress(*self.loss_errors, ValueError):  # Horovod has forgotten sums that were waited for
                wait()
        self.stop()
        self._pending_sums.clear()
        broken = self.mpi
        if not broken.Is_revoked():
            broken.Revoke()
        self.mpi = broken.Shrink()
        broken.Free()
        self._restart_on(self.mpi, pause_s=SETTLE_S)

    def join(self, port: str) -> None:
        """Join the ranks that have invited this one. Raises one of `loss_errors` if a rank is lost."""
        self.stop()
        self._restart_on(connect.merge_ranks(self.mpi, port, is_newcomer=True))
        self.invitation = None

    def admit(self, newcomers: Newcomers) -> None:
        """Admit the newcomers that rank 0 has invited. Raises one of `loss_errors` at a loss: then call `shrink`."""
        self.stop()
        remaining = self.mpi
        try:
            merged = connect.merge_ranks(remaining, newcomers.send_port() if self.rank == 0 else "", is_newcomer=False)
        except self.loss_errors:
            remaining.Revoke()
            merged = None
        if not remaining.Agree(int(merged is not None)):
            if merged is not None:
                merged.Revoke()
            raise self.loss_errors[0]("newcomers were lost while they joined")
        remaining.Free()
        self._restart_on(merged)

    def _restart_on(self, mpi: Any, *, pause_s: float = 0.0) -> None:
        """Switch to this communicator, and restart Horovod on it."""
        self._set_communicator(mpi)
        self._init_arguments = (mpi,)
        members = self._members()
        self.calls.restart(f"{calls.WORLD} {' '.join(str(member.number) for member in members)}")
        time.sleep(pause_s)
        self.barrier()
        self.start()
        self.barrier()
        self.members = members

    def barrier(self) -> None:
        """Return on all ranks, or raise one of `loss_errors` on all of them."""
        with self.wait_context():
            self.mpi.Agree(1)

    def abort(self, status: int) -> NoReturn:
        """End the processes of all ranks."""
        self.mpi.Abort(status)
        raise AssertionError


def _owner(values: Tensor) -> Tensor:
    """Return an object that owns this tensor in C++, as its gradient.

    Without it, when a sum fails, Horovod's thread drops the last reference outside of Python, and torch then takes the
    GIL. Horovod holds the lock of its queue at that moment, and deadlocks if this rank holds the GIL and waits for the
    queue to begin another sum.
    """
    owner = values.new_empty(()).expand_as(values)
    owner.grad = values
    return owner


def require_ulfm(comm: Comm, environment: Mapping[str, str], *, can_grow: bool = False) -> None:
    """Raise BadInput on all ranks if their MPI or its mpirun cannot survive a loss, or cannot grow if required."""
    if not isinstance(comm, HorovodComm) or comm.mpi is None:
        raise BadInput(
            "--elastic needs several ranks with MPI between them. Start with hvdlaunch run --elastic, or mpirun."
        )
    if environment.get("OMPI_MCA_mpi_ft_enable") not in ("1", "true"):
        raise BadInput(
            "--elastic needs an MPI whose ranks survive a lost rank. Set up Open MPI 5 (MPI=5 make setup), and "
            "start with hvdlaunch run --elastic, or mpirun --with-ft ulfm."
        )
    if can_grow and len(hosts := set(comm.allgather(socket.gethostname()))) > 1:
        raise BadInput(
            f"--grow: the ranks are on {len(hosts)} hosts, and with Open MPI 5.0.11 replacement ranks can join on "
            "one host only. Leave --grow out; with hvdlaunch --restarts lost hosts come back when the run starts "
            "again."
        )


def make_elastic(comm: Comm, environment: Mapping[str, str], facts: Mapping[str, Any]) -> ElasticComm:
    """Make the communicator elastic, for launched ranks or newcomers; see `require_ulfm`.

    Raises BadInput if this is a newcomer with other `facts` than the rank that has invited it.
    """
    assert isinstance(comm, HorovodComm)
    os.environ["HOROVOD_ELASTIC"] = "1"  # Horovod raises an error instead of ending the process
    # Horovod's thread also logs an error on all ranks at each loss; the ranks receive it as an exception and report it.
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
    invitation = read_invitation(environment)
    if invitation is not None:
        for name in facts.keys() | invitation.facts.keys():
            if facts.get(name) != invitation.facts.get(name):
                raise BadInput(
                    f"replacement rank: {name} is {facts.get(name)!r}, in the run {invitation.facts.get(name)!r}. "
                    "Install the same code and software on all hosts."
                )
    elastic = ElasticComm(comm.mpi, facts, invitation)
    if invitation is None:
        exits.set_failure_exit(elastic.abort)  # until the training can continue without lost ranks
    return elastic
