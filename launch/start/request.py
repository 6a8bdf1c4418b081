"""A run as the command line asks for it, and what is wrong with it on whatever hosts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from launch.errors import CommandError, PlacementError
from launch.hosts.host import Host
from launch.hosts.slurm import from_slurm, gpus_of_one_task
from launch.machine.local import DRIVER_TIMEOUT_S
from launch.machine.topology import Topology
from launch.placement.measured import Measured
from launch.placement.slots import Binding, ranks_per_host, require_enough_named, require_whole_replicas
from launch.placement.traffic import Traffic
from launch.probe.ssh import SSH, Ssh
from launch.start.environment import exported, require_plain_job

# Of a rank whose host is not known yet. With a GPU: itself, the threads of Horovod and NCCL, and readers of files.
CORES_WITH_GPU, CORES_ON_CPUS = 4, 1

NOTHING_MEASURED = Measured()
Show = Literal["0", "all"]  # what is seen of the ranks: what rank 0 writes, or all ranks line by line


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as the command line asks for it."""

    np: int | None  # None: a rank for each slot
    program: tuple[str, ...]
    hosts: tuple[Host, ...] | None  # None: the nodes of the Slurm allocation, or this host
    topologies: Mapping[str, Topology]  # saved ones, of hosts that are not asked; with any of them no host is
    launcher: Literal["auto", "mpirun", "horovodrun"]
    gpus: Literal["all", "none"] | Collection[int]
    binding: Binding
    ranks_per_replica: int | None  # so many consecutive ranks are on one host; None: ranks are no groups
    apptainer: str | None  # the image
    nsys: bool  # under Nsight Systems
    network: str | None  # where several hosts are to meet: a CIDR or an interface; None: what they share
    exports: tuple[str, ...]
    as_root: bool
    show: Show = "0"
    elastic: bool = False  # ranks that are left go on when one dies
    grow: bool = False  # and others take the places of those that died
    ssh: Ssh = SSH
    driver_timeout_s: float = DRIVER_TIMEOUT_S  # a GPU driver may take so long to answer
    per_host: int | None = None  # slots of each host; None: those of the list
    check: bool = True  # look at what differs between several hosts, and refuse what would fail
    measured: Measured = NOTHING_MEASURED  # in place of the table of link speeds, and of MPI's choice
    traffic: Traffic | None = None  # what ranks send in a step, by which they are mapped to GPUs; None: not known


def usual_cores(request: RunRequest) -> int:
    """The cores to ask for, for each rank, if those of its host are not known."""
    return CORES_ON_CPUS if request.gpus == "none" else CORES_WITH_GPU


def allocation(environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The nodes of the Slurm allocation that this runs in, None outside of one."""
    if "SLURM_JOB_NODELIST" not in environment:
        return None
    nodes, gpus = environment["SLURM_JOB_NODELIST"], gpus_of_one_task(environment)
    return from_slurm(nodes, None if gpus else environment.get("SLURM_TASKS_PER_NODE"), gpus)


def default_hostfile(environment: Mapping[str, str]) -> str | None:
    """The hostfile that Open MPI takes by itself, as /etc/mpi/hostfile in a launcher pod of Kubeflow; None in Slurm."""
    return None if "SLURM_JOB_NODELIST" in environment else environment.get("OMPI_MCA_orte_default_hostfile")


def listed(request: RunRequest, environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The hosts of the request, else of the Slurm allocation, with --per-host slots each; None where there is no list.

    PlacementError where the list gives a host fewer slots than --per-host.
    """
    hosts, slots = request.hosts or allocation(environment), request.per_host
    if hosts is None or slots is None:
        return hosts
    if short := [host for host in hosts if host.counted and host.slots < slots]:
        raise PlacementError(
            f"--per-host {slots} is more than the {short[0].slots} slots of host {short[0].name}: change one of the two"
        )
    return tuple(replace(host, slots=slots, counted=True) for host in hosts)


def with_named(hosts: tuple[Host, ...], gpus: Literal["all", "none"] | Collection[int]) -> tuple[Host, ...]:
    """The hosts, of which those without a number of slots get one for each GPU that --gpus names."""
    if isinstance(gpus, str):
        return hosts
    return tuple(host if host.counted else replace(host, slots=len(gpus), counted=True) for host in hosts)


def check(request: RunRequest, hosts: tuple[Host, ...] | None, environment: Mapping[str, str]) -> None:
    """LaunchError for what is wrong with a request on whatever `hosts`; None where not even their names are known.

    Slots that are counted from the hosts' GPUs are not known yet: then the rest of it waits for the placement.
    """
    require_plain_job(environment)
    exported(environment, request.exports)
    if request.elastic and request.ranks_per_replica is not None:
        raise CommandError("--elastic does not work with --ranks-per-replica. Use only one.")
    if request.traffic is not None and (size := len(request.traffic.parts)) != (request.ranks_per_replica or 1):
        remedy = f"pass --ranks-per-replica {size}" if size > 1 else "leave --ranks-per-replica out"
        raise CommandError(f"--traffic: a replica of that run is {size} rank{'s' if size > 1 else ''}: {remedy}")
    known = hosts or (Host(name="any", slots=max(request.np or 1, 1), counted=request.np is not None),)
    if not all(host.counted for host in known):
        return
    np = sum(host.slots for host in known) if request.np is None else request.np
    share = ranks_per_host(known, np)
    require_whole_replicas(request.ranks_per_replica, [host for host in known if host.name in share], np)
    if hosts:
        require_enough_named(request.gpus, share)
