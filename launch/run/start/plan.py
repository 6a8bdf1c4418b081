"""The plan of a run: which rank runs where, and the program."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from launch.machine.mpi import Parameter
from launch.machine.topology import Topology
from launch.placement.slots import RankSlot
from launch.run.start.request import RunRequest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run: which rank runs where, and the program."""

    request: RunRequest
    slots: tuple[RankSlot, ...]
    hostnames: Mapping[str, str | None]  # host -> its own host name; None if it was not probed
    local: frozenset[str]  # the hosts that are this machine
    program: tuple[str, ...]  # including what it runs under
    executable: str | None  # absolute path of its first word; None if this machine lacks it
    job: str
    network: str | None  # where the hosts connect, a CIDR or an interface that all have; None on one host
    daemon_networks: str | None  # `network`, and the network over which mpirun reaches the hosts; None without daemons
    rendezvous: Mapping[str, str]  # torchrun's variables that all ranks share, unless the user sets them
    exports: tuple[str, ...]  # names of variables that every rank gets
    mca: tuple[Parameter, ...]  # Open MPI's parameters set by the user, which replace ours
    environment: Mapping[str, str]  # the part of our environment for the launcher
    remarks: tuple[str, ...]  # notes for the user, one line each
    apart: frozenset[str] = frozenset()  # hosts that are known not to see the run's working folder
    settings: Mapping[str, str] = field(default_factory=dict)  # variables that --measured has set
    topologies: Mapping[str, Topology] = field(default_factory=dict)  # of the hosts that have ranks
