"""A run as requested on the command line, and checks that do not depend on the hosts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.errors import CommandError, PlacementError
from launch.hosts.host import Host
from launch.hosts.slurm import read_allocation
from launch.hosts.ssh import SSH, Ssh
from launch.machine.mpi import Parameter, first
from launch.machine.topology import Topology
from launch.placement.findings import named
from launch.placement.measured import Measured
from launch.placement.slots import Binding, ranks_per_host, require_enough_named, require_whole_replicas
from launch.placement.traffic import Traffic
from launch.run.start.environment import exported, require_plain_job

# For a rank on an unknown host. With a GPU: the rank, the threads of Horovod and NCCL, and data loading processes.
CORES_WITH_GPU, CORES_ON_CPUS = 4, 1

NOTHING_MEASURED = Measured()
# Lines and columns of our standard output and standard error, which the ranks' get; None: not a terminal.
Terminals = tuple[tuple[int, int] | None, tuple[int, int] | None]
Show = Literal["0", "all"]  # visible output of the ranks: rank 0's, or that of all ranks line by line


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt of a run, as its ranks know it."""

    restart: int = 0  # 0 for the first start, then 1, 2...
    max_restarts: int = 0
    keeper: str = ""  # name of the keepers' sockets, for ranks that may start again
    snapshots: str = ""  # process, descriptor and name of our memory for the newest state


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as requested on the command line."""

    np: int | None  # None: one rank per slot
    program: tuple[str, ...]
    hosts: tuple[Host, ...] | None  # None: the nodes of the Slurm allocation, or this host
    topologies: Mapping[str, Topology]  # saved topologies; if there is one, no host is probed
    launcher: str  # as --launcher spells it; auto: mpirun
    gpus: Literal["all", "none"] | Collection[int]
    binding: Binding
    ranks_per_replica: int | None  # this number of consecutive ranks share a host; None: ranks are not grouped
    apptainer: str | None  # the image
    nsys: bool  # under Nsight Systems
    network: str | None  # where several hosts connect: a CIDR or an interface; None: a network that they share
    exports: tuple[str, ...]
    as_root: bool
    show: Show = "0"
    terminals: Terminals = (None, None)
    after_checkpoint: str | None = None  # a shell command for each whole checkpoint
    attempt: Attempt = Attempt()
    spot: str | None = None  # the cloud whose notices of an end are watched, as --spot spells it
    ssh: Ssh = SSH
    per_host: int | None = None  # slots of each host; None: those of the list
    check: bool = True  # compare several hosts, and reject what would fail
    measured: Measured = NOTHING_MEASURED  # replaces the table of link speeds, and MPI's choice
    traffic: Traffic | None = None  # what ranks send in a step, for mapping them to GPUs; None: unknown
    parameters: tuple[Parameter, ...] = ()  # that Open MPI's files set


def usual_cores(request: RunRequest) -> int:
    """Return the cores to request per rank if its host is not known."""
    return CORES_ON_CPUS if request.gpus == "none" else CORES_WITH_GPU


def allocation(environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return the nodes of the Slurm job or step that hvdlaunch runs in, None outside of one."""
    found = read_allocation(environment)
    return None if found is None else found.hosts


def note_of_step(environment: Mapping[str, str]) -> str | None:
    """Return a note if hvdlaunch runs in a step on some nodes of its Slurm job; None if not."""
    found = read_allocation(environment)
    if found is None or found.step_of in (None, len(found.hosts)):
        return None
    nodes = named([host.name for host in found.hosts])
    return (
        f"note: this shell is a Slurm step on {nodes}, {len(found.hosts)} of the {found.step_of} nodes of the job: the "
        "others are not used. To use all nodes, start from the batch script or the shell of salloc."
    )


def default_hostfile(parameters: Sequence[Parameter], environment: Mapping[str, str]) -> Parameter | None:
    """Return who names Open MPI's default hostfile, as in a launcher pod of Kubeflow; None without, and in Slurm."""
    named = first(parameters, ("prte_default_hostfile", "orte_default_hostfile"))
    return None if named is None or named.value == "none" or allocation(environment) else named


def listed(request: RunRequest, environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return the hosts of the request, else of the Slurm allocation, with --per-host slots each; None without a list.

    Raises PlacementError if the list gives a host fewer slots than --per-host.
    """
    hosts, slots = request.hosts or allocation(environment), request.per_host
    if hosts is None or slots is None:
        return hosts
    if short := [host for host in hosts if host.counted and host.slots < slots]:
        raise PlacementError(
            f"--per-host {slots} is more than the {short[0].slots} slots of host {short[0].name}: change one of the two"
        )
    return tuple(replace(host, slots=slots, counted=True, unit="rank") for host in hosts)


def with_named(hosts: tuple[Host, ...], gpus: Literal["all", "none"] | Collection[int]) -> tuple[Host, ...]:
    """Return the hosts; one without a number of slots gets one slot for each GPU that --gpus names."""
    if isinstance(gpus, str):
        return hosts
    return tuple(host if host.counted else replace(host, slots=len(gpus), counted=True) for host in hosts)


def check(request: RunRequest, hosts: tuple[Host, ...] | None, environment: Mapping[str, str]) -> None:
    """Raise LaunchError if a request is invalid for these `hosts`; None if not even their names are known.

    If slots depend on the hosts' GPUs, the remaining checks wait for the placement.
    """
    require_plain_job(environment)
    exported(environment, request.exports)
    if request.traffic is not None and (size := len(request.traffic.parts)) != (request.ranks_per_replica or 1):
        remedy = f"pass --ranks-per-replica {size}" if size > 1 else "leave --ranks-per-replica out"
        raise CommandError(f"--measured: a replica of that run is {size} rank{'s' if size > 1 else ''}: {remedy}")
    known = hosts or (Host(name="any", slots=max(request.np or 1, 1), counted=request.np is not None),)
    if not all(host.counted for host in known):
        return
    np = sum(host.slots for host in known) if request.np is None else request.np
    share = ranks_per_host(known, np)
    require_whole_replicas(request.ranks_per_replica, [host for host in known if host.name in share], np)
    if hosts:
        require_enough_named(request.gpus, hosts, np)
