"""The plan of a run, and the launcher that starts it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from launch.machine.mpi import Mpi, Parameter
from launch.machine.topology import Topology
from launch.placement.slots import RankSlot
from launch.placement.traffic import Traffic
from launch.probe.ssh import SSH, Ssh
from launch.start.request import Show, Terminals


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run: which rank runs where, and the program."""

    slots: tuple[RankSlot, ...]
    ranks_per_replica: int | None  # this number of consecutive ranks form a group on one host
    hostnames: Mapping[str, str | None]  # host -> its own host name; None if it was not probed
    local: frozenset[str]  # the hosts that are this machine
    program: tuple[str, ...]  # including what it runs under
    executable: str | None  # absolute path of its first word; None if this machine lacks it
    job: str
    network: str | None  # where the hosts connect, a CIDR or an interface that all have; None on one host
    daemon_networks: str | None  # `network`, and the network over which mpirun reaches the hosts
    rendezvous: Mapping[str, str]  # torchrun's variables that all ranks share, unless the user sets them
    exports: tuple[str, ...]  # names of variables that every rank gets
    mca: tuple[Parameter, ...]  # Open MPI's parameters set by the user, which replace ours
    environment: Mapping[str, str]  # the part of our environment for the launcher
    as_root: bool
    show: Show
    terminals: Terminals
    remarks: tuple[str, ...]  # notes for the user, one line each
    elastic: bool = False  # the remaining ranks continue when one is lost
    grow: bool = False  # replacement ranks join for lost ones
    apart: frozenset[str] = frozenset()  # hosts that are known not to see the run's working folder
    traffic: Traffic | None = None  # what ranks send in a step, if known
    settings: Mapping[str, str] = field(default_factory=dict)  # variables that --measured has set
    topologies: Mapping[str, Topology] = field(default_factory=dict)  # of the hosts that have ranks


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The programs that start the ranks."""

    python: str  # the interpreter that runs launch.rank.bind, at the same path on every host
    mpi: Mpi
    horovodrun: str | None  # its path if it is to start mpirun
    ssh: Ssh = SSH  # how to reach other hosts
