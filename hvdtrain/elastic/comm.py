"""Ranks of which some may be lost: those that are left close up, by the ULFM of Open MPI 5.

After a loss the pending collectives of the others fail. Then all of them call `close_up`: it revokes the communicator,
so that nobody waits in it any more, and shrinks it to those that are left, in their old order; the lowest of them is
the new rank 0.
"""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from hvdtrain.ranks.comm import Comm, HorovodComm, losses
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput

T = TypeVar("T")

# Before Horovod starts anew: where a rank is lost in that moment it waits for ever, and ranks often die together.
SETTLE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank as it was launched: its number stays, though its place among those that are left may not."""

    launched: int
    host: str
    pid: int


class ElasticComm(HorovodComm):
    """All ranks that are left of a run."""

    def __init__(self, mpi: Any) -> None:
        """`mpi` is MPI's world."""
        super().__init__(mpi.Dup(), is_world=False)
        self.losses = losses()
        self._begun: dict[Callable[[], Tensor], Tensor] = {}  # sums that have not come yet, see _owner
        self.me = Member(launched=self.rank, host=socket.gethostname(), pid=os.getpid())
        self.members = self._members()

    def _members(self) -> list[Member]:
        """By rank."""
        return [Member(**one) for one in self.allgather(asdict(self.me))]

    def allgather(self, value: Any) -> list[Any]:
        return self._whole(lambda: super(ElasticComm, self).allgather(value))

    def gather(self, content: bytes) -> list[bytes]:
        return self._whole(lambda: super(ElasticComm, self).gather(content))

    def _whole(self, gather: Callable[[], list[T]]) -> list[T]:
        """What it returns; a loss where it cannot be read: Open MPI 5.0.11 may leave out a lost rank's part."""
        try:
            return gather()
        except self.losses:
            raise
        except Exception as error:
            raise self.losses[0]("a gather came back torn") from error

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        whole = super().broadcast(content, root)
        if len(set(self.allgather(hashlib.sha256(whole).hexdigest()))) > 1:
            raise self.losses[0]("a broadcast came back torn")
        return whole

    def begin_sum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        owner = _owner(values)
        begun = super().begin_sum(values, name)
        self._begun[begun] = owner
        return partial(self._end_sum, begun)

    def _end_sum(self, begun: Callable[[], Tensor]) -> Tensor:
        total = begun()
        del self._begun[begun]
        return total

    def close_up(self) -> list[Member]:
        """Become the ranks that are left: those that were lost. Raises one of `losses` where another is lost in it.

        Then all that are left call it again.
        """
        for begun in self._begun:
            with suppress(*self.losses, ValueError):  # Horovod knows those no more that were waited for
                begun()
        self.stop()
        self._begun.clear()
        _forget_tensors()
        broken = self._mpi
        if not broken.Is_revoked():
            broken.Revoke()
        self._mpi = broken.Shrink()
        broken.Free()
        self._take_places(self._mpi)
        self._of_horovod = (self._mpi,)
        left = self._members()
        time.sleep(SETTLE_S)
        self.meet()
        self.start()
        self.meet()
        lost = [one for one in self.members if one not in left]
        self.members = left
        return lost

    def meet(self) -> None:
        """Return on all ranks, or raise one of `losses` on all of them."""
        with self.waiting():
            self._mpi.Agree(1)

    def abort(self, status: int) -> NoReturn:
        """End the processes of all ranks."""
        self._mpi.Abort(status)
        raise AssertionError


def _owner(values: Tensor) -> Tensor:
    """Something that holds this tensor as C++ does, by a gradient.

    Else Horovod's thread, which lets go of all tensors when a sum fails, would be the last one but Python to hold it.
    Then torch takes the GIL. Horovod has locked its queue by then, and waits for ever where this rank holds the GIL
    and waits for the queue, to begin another sum.
    """
    owner = values.new_empty(()).expand_as(values)
    owner.grad = values
    return owner


def _forget_tensors() -> None:
    """Have Horovod's binding let go of the tensors of sums that failed, which it keeps for ever."""
    from horovod.torch import mpi_ops

    mpi_ops._handle_map.clear()


def outliving(comm: Comm, environment: Mapping[str, str]) -> ElasticComm:
    """The same ranks, which outlive others; BadInput where their MPI or its mpirun does not let them."""
    if not isinstance(comm, HorovodComm) or comm.over_mpi is None:
        raise BadInput(
            "--elastic needs several ranks with MPI between them: start with hvdlaunch run --elastic, or mpirun"
        )
    if environment.get("OMPI_MCA_mpi_ft_enable") not in ("1", "true"):
        raise BadInput(
            "--elastic needs an MPI whose ranks outlive each other: set up Open MPI 5 (MPI=5 make setup), and start "
            "with hvdlaunch run --elastic, or mpirun --with-ft ulfm"
        )
    os.environ["HOROVOD_ELASTIC"] = "1"  # Horovod raises an error where it would end the process
    elastic = ElasticComm(comm.over_mpi)
    exits.end_by(elastic.abort)  # until the training goes on without others: they would wait for ever
    return elastic
