"""What is decided about a run, and what starts it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from launch.machine.mpi import Mpi
from launch.machine.topology import Topology
from launch.placement.slots import RankSlot
from launch.placement.traffic import Traffic
from launch.probe.ssh import SSH, Ssh
from launch.start.request import Show


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who runs what where."""

    slots: tuple[RankSlot, ...]
    ranks_per_replica: int | None  # so many consecutive ranks are a group on one host
    hostnames: Mapping[str, str | None]  # host -> what it calls itself; None if it was not asked
    program: tuple[str, ...]  # with what it runs under
    job: str
    network: str | None  # where the hosts meet, a CIDR or an interface of all of them; None on one host
    daemon_networks: str | None  # the same, and the network over which mpirun reaches them
    rendezvous: Mapping[str, str]  # MASTER_ADDR and MASTER_PORT of rank 0's host, unless the user gives them
    exports: tuple[str, ...]  # names of variables that every rank gets
    mca: frozenset[str]  # parameters of Open MPI that the user's environment sets: ours are left out
    environment: Mapping[str, str]  # what the launcher gets of ours
    as_root: bool
    show: Show
    remarks: tuple[str, ...]  # what the user should know, one line each
    elastic: bool = False  # ranks that are left go on when one dies
    grow: bool = False  # and others take the places of those that died
    apart: frozenset[str] = frozenset()  # hosts that do not see the folder that the run is started from, if known
    traffic: Traffic | None = None  # what ranks send in a step, if it is known
    settings: Mapping[str, str] = field(default_factory=dict)  # variables in the environment that --measured has set
    topologies: Mapping[str, Topology] = field(default_factory=dict)  # of the hosts that have ranks


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What starts the ranks."""

    python: str  # the interpreter that runs launch.rank.bind, at the same path on every host
    mpi: Mpi
    horovodrun: str | None  # its path if it is to start mpirun
    ssh: Ssh = SSH  # how it comes to other hosts
