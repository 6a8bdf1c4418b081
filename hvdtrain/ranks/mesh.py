"""All ranks of a run that Horovod connects in parts."""

from typing import Any

from hvdtrain.ranks.comm import Comm, Group, Members
from hvdtrain.ranks.members import MpiMembers


class MeshComm(MpiMembers):
    """A Comm of which Horovod has the `data` alone: what all ranks tell each other goes over MPI."""

    def __init__(
        self, world: Comm, mpi: Any, *, data: Group, replica: Members, sync_group: Members | None = None
    ) -> None:
        """`world` are the same ranks, `mpi` is their communicator; `sync_group` is all of them if not given."""
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.data, self.replica, self.sync_group = data, replica, sync_group or self
        self.gather, self.broadcast, self.start = world.gather, world.broadcast, data.start
        super().__init__(mpi, world, data, replica, *([] if sync_group is None else [sync_group]))
