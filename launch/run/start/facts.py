"""The facts about hosts, this machine and its programs; all probes of a run start here."""

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import CommandError, HostError
from launch.hosts.host import Host
from launch.hosts.host_facts import HostFacts
from launch.hosts.probe import all_usable, is_local, probe_hosts
from launch.machine.condition import open_inspection
from launch.machine.mpi import Mpi, parse_mpi
from launch.machine.system import address_toward, interfaces
from launch.machine.topology import Interface
from launch.placement.findings import named
from launch.placement.slots import ranks_per_host, with_slots
from launch.process import Answer, find
from launch.process import ask as ask_program
from launch.run.start.launchers.choose import launcher_of
from launch.run.start.launchers.launcher import Launcher
from launch.run.start.request import RunRequest, listed

IMAGE_S = 60.0  # limit for a program inside an image to respond
NO_AGENT = ("false",)  # Open MPI 4 ends if it finds no ssh, also on one host, where it needs none


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts on which a run is based."""

    hosts: tuple[Host, ...] | None  # as listed, but this machine first; None if none is listed
    answers: Mapping[str, HostFacts]  # of every host that may get ranks
    local: frozenset[str]  # the hosts that are this machine
    launcher: Launcher
    interfaces: tuple[Interface, ...]  # of this machine
    own_addresses: Mapping[str, str]  # host -> this machine's address on the route there, if there is one
    programs: Mapping[str, str]  # name -> absolute path, of the programs that the run may need and this machine has


def ask(
    request: RunRequest, environment: Mapping[str, str], folder: Path, known: Mapping[str, HostFacts] | None = None
) -> Facts:
    """Probe the hosts that may get ranks, and this machine; LaunchError names what does not respond.

    If the facts of the hosts are `known`, no host is probed.
    """
    launcher = launcher_of(request)
    hosts = listed(request, environment)
    if hosts and not request.topologies:
        # Open MPI counts the host that it starts on first, regardless of its position in the list.
        hosts = tuple(sorted(hosts, key=lambda host: not is_local(host.name)))
    names = (request.program[0], "apptainer", "nsys")
    programs = {name: path for name in names if (path := find(name, environment.get("PATH"))) is not None}
    program = programs.get("apptainer" if request.apptainer else "nsys" if request.nsys else request.program[0])
    answers = _answers(request, hosts, launcher.mpi, folder, program) if known is None else known
    local = frozenset(host for host, answer in answers.items() if answer.hostname is not None and is_local(host))
    if local == answers.keys() and find(request.ssh.agent[0]) is None:
        launcher = launcher_of(replace(request, ssh=replace(request.ssh, agent=NO_AGENT)))
    if request.apptainer is not None:
        _require_image(request.apptainer, launcher.mpi, programs, nsys=request.nsys)
    return Facts(
        hosts=hosts,
        answers=answers,
        local=local,
        launcher=launcher,
        interfaces=interfaces(),
        own_addresses=own_addresses(answers),
        programs=programs,
    )


def _answers(
    request: RunRequest, hosts: Sequence[Host] | None, mpirun: Mpi, folder: Path, program: str | None
) -> dict[str, HostFacts]:
    """Return the facts of every host that the run may use."""
    if request.topologies:
        names = [host.name for host in hosts] if hosts else list(request.topologies)
        if missing := [name for name in names if name not in request.topologies]:
            add = f"--topology {missing[0]}=FILE{', one for each' if len(missing) > 1 else ''}"
            raise HostError(f"no saved topology of {named(missing)}: add {add}, or leave --topology out")
        return {name: HostFacts(host=name, hostname=None, topology=request.topologies[name]) for name in names}
    names = _may_get_ranks(hosts, request.np) if hosts else ["localhost"]
    answers = _probed(request, names, mpirun, folder, program)
    if hosts and request.np is not None and len(names) < len(hosts):
        topologies = {name: answer.topology for name, answer in answers.items()}
        asked = [host for host in hosts if host.name in answers]
        group = request.ranks_per_replica
        room = with_slots(asked, topologies, np=None, gpus=request.gpus, ranks_per_replica=group)
        if sum(host.slots for host in room) < request.np:  # their slots were cores
            return _probed(request, [host.name for host in hosts], mpirun, folder, program)
    return answers


def _probed(
    request: RunRequest, names: Sequence[str], mpirun: Mpi, folder: Path, program: str | None
) -> dict[str, HostFacts]:
    """Return the facts of these hosts."""
    with contextlib.ExitStack() as asking:
        inspection = (
            asking.enter_context(open_inspection(folder, program=program)) if request.check and len(names) > 1 else None
        )
        answers = probe_hosts(
            names,
            ssh=request.ssh,
            mpirun=mpirun,
            python=sys.executable,
            folder=str(folder),
            gpus=request.gpus != "none",
            inspection=inspection,
        )
    return all_usable(answers)


def _may_get_ranks(hosts: Sequence[Host], np: int | None) -> list[str]:
    """Return the hosts to probe; all if their slots are unknown before."""
    if np is None or not all(host.counted for host in hosts):
        return [host.name for host in hosts]
    return list(ranks_per_host(hosts, np))


def own_addresses(answers: Mapping[str, HostFacts]) -> dict[str, str]:
    """Return this machine's address on the route to each host; hosts without a route are missing."""
    addresses = {}
    for host, answer in answers.items():
        if answer.address is not None:
            with contextlib.suppress(OSError):  # no route
                addresses[host] = address_toward(answer.address)
    return addresses


def _require_image(image: str, mpi: Mpi, programs: Collection[str], *, nsys: bool) -> None:
    """Raise CommandError unless the image has the launcher's MPI, by name and major version, and all other needs."""
    if not Path(image).exists():
        raise CommandError(f"--apptainer {image}: no such image")
    if "apptainer" not in programs:
        return  # launch.run.start.decide names it with all else that this host lacks
    mpirun = _inside(image, "mpirun")
    inside = None if mpirun.status else parse_mpi("mpirun", mpirun.out)
    if inside is None or (inside.name, inside.version[0]) != (mpi.name, mpi.version[0]):
        raise CommandError(
            f"--apptainer {image}: inside is {inside or 'no mpirun'}, outside {mpi}: ranks inside only "
            "meet an mpirun of the same major version outside; build the image with that one"
        )
    if nsys and _inside(image, "nsys").status:
        raise CommandError(f"--nsys: no nsys inside {image}: install Nsight Systems there, or leave --nsys out")


def _inside(image: str, program: str) -> Answer:
    return ask_program(["apptainer", "exec", image, program, "--version"], timeout_s=IMAGE_S)
