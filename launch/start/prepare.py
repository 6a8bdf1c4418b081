"""From a requested run to one that is ready to start: the hosts are asked, nothing is started."""

import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.choose import network
from launch.choose.placement import Binding, nearest_nics, place, ranks_per_host
from launch.errors import CommandError, HostError
from launch.hosts.host import MAX_SLOTS, Host
from launch.hosts.slurm import from_slurm
from launch.machine.mpi import Mpi, parse_mpi, read_mpi
from launch.machine.system import interfaces
from launch.machine.topology import Topology
from launch.process import ask, find
from launch.reach.ask import address_toward, ask_hosts, is_local
from launch.reach.probe import HostFacts
from launch.start import command
from launch.start.environment import exported, launcher_environment, plan_json, rank_environment


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
    apptainer: str | None  # the image
    nsys: bool  # under Nsight Systems
    exports: tuple[str, ...]
    as_root: bool


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    spec: command.LaunchSpec
    argv: list[str]
    environment: dict[str, str]  # of the launcher; HVDLAUNCH_REPORT is still missing
    interfaces: Mapping[str, str | None]  # host -> the interface that is on the shared network
    adapters: Mapping[str, tuple[str, ...]]  # host -> its InfiniBand or RoCE adapters near the GPUs
    remarks: tuple[str, ...]  # what the user should know, one line each


def prepare(
    request: RunRequest, environment: Mapping[str, str], folder: Path, known: Mapping[str, HostFacts] | None = None
) -> PreparedRun:
    """Ask the hosts, place the ranks and build the command; LaunchError where the run cannot be started as requested.

    With `known` facts of the hosts none is asked.
    """
    if os.geteuid() == 0 and not request.as_root and not request.topologies:
        raise CommandError("run as root: add --allow-run-as-root if you mean it, as in a container")
    exports = exported(environment, request.exports)
    mpirun, horovodrun = launchers(request)
    hosts = request.hosts or allocation(environment)
    if hosts and not request.topologies:
        # Open MPI counts the host that it starts on first, wherever that stands in the list.
        hosts = tuple(sorted(hosts, key=lambda host: not is_local(host.name)))
    facts = facts_of(request, hosts, mpirun, folder) if known is None else known
    require_distinct(facts)
    topologies = {host: answer.topology for host, answer in facts.items()}
    hosts = hosts or own_slots(request, topologies)
    slots = place(hosts, topologies, np=request.np, gpus=request.gpus, binding=request.binding)
    used = {slot.host: facts[slot.host] for slot in slots}
    require_program(request, used, environment)
    shared, interface_names = shared_network(used)
    program = command.under_nsys(request.program) if request.nsys else request.program
    if request.apptainer is not None:
        require_same_mpi(request.apptainer, mpirun)
        if request.nsys:
            require_nsys_inside(request.apptainer)
        program = command.in_apptainer(program, request.apptainer)
    spec = command.LaunchSpec(
        slots=slots,
        program=program,
        python=sys.executable,
        mpi=mpirun,
        horovodrun=horovodrun,
        network=shared,
        daemon_networks=daemon_networks(shared, used),
        exports=exports,
        as_root=request.as_root,
    )
    why = "--gpus none" if request.gpus == "none" else "no GPU found"
    remarks = [] if slots[0].gpu is not None else [f"{why}: the ranks run on CPUs"]
    return _rendered(spec, used, interface_names, environment, remarks)


def _rendered(
    spec: command.LaunchSpec,
    used: Mapping[str, HostFacts],
    interface_names: Mapping[str, str | None],
    environment: Mapping[str, str],
    remarks: Sequence[str],
) -> PreparedRun:
    """The command, and the environments of the launcher and of each rank."""
    gpus = {host: [slot.gpu for slot in spec.slots if slot.host == host and slot.gpu is not None] for host in used}
    several = len(used) > 1
    adapters = {host: nearest_nics(answer.topology, gpus[host]) for host, answer in used.items()} if several else {}
    rank_environments = [
        rank_environment(
            slot,
            interface=interface_names.get(slot.host),
            launcher_exports_all=spec.horovodrun is not None and spec.network is not None,
            adapters=adapters.get(slot.host, ()),
            set_by_user=[name for name in environment if name in spec.exports],
        )
        for slot in spec.slots
    ]
    plan = plan_json(
        spec,
        {host: answer.hostname for host, answer in used.items()},
        rank_environments,
        {name: environment[name] for name in sorted(environment) if name.startswith("NCCL_") and name in spec.exports},
    )
    # The last part keeps runs apart that start in the same second.
    job = environment.get("HVDLAUNCH_JOB") or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    return PreparedRun(
        spec=spec,
        argv=command.argv(spec),
        environment=launcher_environment(spec, environment, {"HVDLAUNCH_PLAN": plan, "HVDLAUNCH_JOB": job}),
        interfaces=interface_names,
        adapters=adapters,
        remarks=tuple(remarks),
    )


def launchers(request: RunRequest) -> tuple[Mpi, str | None]:
    """The mpirun of PATH, and horovodrun's path if that is to start mpirun; 'auto' is mpirun alone."""
    path = find("mpirun")
    if path is None and request.topologies:
        horovodrun = "horovodrun" if request.launcher == "horovodrun" else None
        return Mpi(path="mpirun", name="Open MPI", version=(4, 1)), horovodrun
    found = read_mpi(path) if path else None
    if path and found is None:
        raise CommandError(f"{path} --version does not say which MPI it is: put Open MPI 4 or 5 first in PATH")
    if found is None:
        raise CommandError(
            "no mpirun on PATH: activate the project's environment (. .venv/bin/activate), or install Open MPI 4 or 5"
        )
    if request.launcher != "horovodrun":
        return found, None
    if (horovodrun := find("horovodrun")) is None:
        raise CommandError("no horovodrun on PATH: activate the project's environment, or give --launcher mpirun")
    return found, horovodrun


def facts_of(request: RunRequest, hosts: Sequence[Host] | None, mpirun: Mpi, folder: Path) -> dict[str, HostFacts]:
    """What is known of every host that the run may use."""
    if request.topologies:
        names = [host.name for host in hosts] if hosts else list(request.topologies)
        if missing := [name for name in names if name not in request.topologies]:
            raise HostError(
                f"host {missing[0]} has no --topology {missing[0]}=FILE: give one for every host, or for none"
            )
        return {name: HostFacts(host=name, hostname=None, topology=request.topologies[name]) for name in names}
    names = list(ranks_per_host(hosts, request.np)) if hosts else ["localhost"]
    gpus = request.gpus != "none"
    return ask_hosts(names, mpirun=mpirun, python=sys.executable, folder=str(folder), gpus=gpus)


def require_distinct(facts: Mapping[str, HostFacts]) -> None:
    """HostError where two names mean the same host."""
    first: dict[str, str] = {}
    for host, answer in facts.items():
        name = answer.hostname
        if name is not None and (other := first.setdefault(name, host)) != host:
            raise HostError(f"{other} and {host} are the same host, {name}: name it once, with all its slots")


def allocation(environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The nodes of the Slurm allocation that this runs in, None outside of one."""
    if "SLURM_JOB_NODELIST" not in environment:
        return None
    return from_slurm(environment["SLURM_JOB_NODELIST"], environment.get("SLURM_TASKS_PER_NODE"))


def own_slots(request: RunRequest, topologies: Mapping[str, Topology]) -> tuple[Host, ...]:
    """Slots of hosts that were listed without any: one per GPU, or on CPUs as many as there are ranks."""
    gpus = {name: 0 if request.gpus == "none" else len(topology.gpus) for name, topology in topologies.items()}
    return tuple(Host(name=name, slots=count or min(request.np, MAX_SLOTS)) for name, count in gpus.items())


def require_program(request: RunRequest, used: Mapping[str, HostFacts], environment: Mapping[str, str]) -> None:
    """CommandError where this host is in the run and does not have the program, or what it is to run under."""
    program = "apptainer" if request.apptainer is not None else request.program[0]
    here = [host for host, answer in used.items() if answer.hostname is not None and is_local(host)]
    if here and shutil.which(program, path=environment.get("PATH")) is None:
        remedy = "install it, or leave --apptainer out" if request.apptainer else "correct what stands after --"
        raise CommandError(f"no program {program!r} on this host: {remedy}")
    if here and request.nsys and not request.apptainer and shutil.which("nsys", path=environment.get("PATH")) is None:
        raise CommandError(
            "--nsys: no nsys on this host: put the bin folder of Nsight Systems in PATH, or leave --nsys out"
        )


def shared_network(used: Mapping[str, HostFacts]) -> tuple[str | None, dict[str, str | None]]:
    """The network that the hosts share, and each one's interface on it; none for this host alone or hosts not asked."""
    known = {host: answer.topology.interfaces for host, answer in used.items() if answer.hostname is not None}
    if not known or all(is_local(host) for host in known):
        return None, {}
    shared = network.shared_network(known, {host: answer.address for host, answer in used.items() if answer.address})
    return shared, {host: network.name_on(own, shared) for host, own in known.items()}


def daemon_networks(shared: str | None, used: Mapping[str, HostFacts]) -> str | None:
    """The networks, as CIDR, between mpirun and its daemons: a login node may reach the hosts over another one."""
    own = interfaces()
    if shared is None or network.name_on(own, shared):
        return shared
    address = next((answer.address for answer in used.values() if answer.address), None)
    if address is None:
        raise HostError(
            f"ssh reaches {', '.join(used)} over IPv6, mpirun needs IPv4: add `AddressFamily inet` to ~/.ssh/config"
        )
    try:
        return f"{shared},{network.network_of(own, address_toward(address))}"
    except (OSError, StopIteration) as error:
        raise HostError(
            f"{address} can be reached by ssh but not directly, and mpirun must: start on a host of {shared}"
        ) from error


def require_nsys_inside(image: str) -> None:
    """CommandError unless Nsight Systems is in the image."""
    if ask(["apptainer", "exec", image, "nsys", "--version"], timeout_s=60).status:
        raise CommandError(f"--nsys: no nsys inside {image}: install Nsight Systems there, or leave --nsys out")


def require_same_mpi(image: str, outside: Mpi) -> None:
    """CommandError unless the image holds the MPI that starts the ranks, by name and major version."""
    if not Path(image).exists():
        raise CommandError(f"--apptainer {image}: there is no such image")
    answer = ask(["apptainer", "exec", image, "mpirun", "--version"], timeout_s=60)
    inside = None if answer.status else parse_mpi("mpirun", answer.out)
    if inside is None or (inside.name, inside.version[0]) != (outside.name, outside.version[0]):
        raise CommandError(
            f"--apptainer {image}: inside is {inside or 'no mpirun'}, outside {outside}: ranks inside only meet an "
            "mpirun of the same major version outside; build the image with that one"
        )
