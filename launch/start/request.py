"""A run as the command line asks for it, and what is wrong with it on whatever hosts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from launch.choose.placement import Binding, ranks_per_host, require_enough_named, require_whole_replicas
from launch.hosts.host import Host
from launch.hosts.slurm import from_slurm, gpus_of_one_task
from launch.machine.local import DRIVER_TIMEOUT_S
from launch.machine.topology import Topology
from launch.reach.ssh import SSH, Ssh
from launch.start.environment import exported, require_plain_job


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as the command line asks for it."""

    np: int
    program: tuple[str, ...]
    hosts: tuple[Host, ...] | None  # None: the nodes of the Slurm allocation, or this host
    topologies: Mapping[str, Topology]  # saved ones, of hosts that are not asked; with any of them no host is
    launcher: Literal["auto", "mpirun", "horovodrun"]
    gpus: Literal["auto", "none"] | Collection[int]
    binding: Binding
    ranks_per_replica: int | None  # so many consecutive ranks are on one host; None: ranks are no groups
    apptainer: str | None  # the image
    nsys: bool  # under Nsight Systems
    network: str | None  # where several hosts are to meet: a CIDR or an interface; None: what they share
    exports: tuple[str, ...]
    as_root: bool
    reach: Ssh = SSH
    driver_timeout_s: float = DRIVER_TIMEOUT_S  # a GPU driver may take so long to answer


def allocation(environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The nodes of the Slurm allocation that this runs in, None outside of one."""
    if "SLURM_JOB_NODELIST" not in environment:
        return None
    nodes, gpus = environment["SLURM_JOB_NODELIST"], gpus_of_one_task(environment)
    return from_slurm(nodes, None if gpus else environment.get("SLURM_TASKS_PER_NODE"), gpus)


def check(request: RunRequest, hosts: tuple[Host, ...] | None, environment: Mapping[str, str]) -> None:
    """LaunchError for what is wrong with a request on whatever `hosts`; None where not even their names are known."""
    require_plain_job(environment)
    exported(environment, request.exports)
    known = hosts or (Host(name="any", slots=max(request.np, 1)),)
    share = ranks_per_host(known, request.np)
    require_whole_replicas(request.ranks_per_replica, [host for host in known if host.name in share], request.np)
    if hosts:
        require_enough_named(request.gpus, share)
