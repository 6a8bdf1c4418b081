"""The facts about a host: its GPUs, NICs and cores, and its MPI; nothing on it is changed.

python -m launch.hosts.host_facts MPIRUN gpus|none SECONDS [TOKEN PROGRAM FOLDER...]       prints one line of JSON

SECONDS is the limit for its GPU driver. With a token and a program (an empty argument for none) and folders, its
condition is included.
"""

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

from launch import documents
from launch.errors import HostError, LaunchError, TopologyError
from launch.machine import nvidia
from launch.machine.condition import Condition, Inspection, read_condition
from launch.machine.decode import decode, short
from launch.machine.local import local_topology
from launch.machine.mpi import Mpi, read_mpi
from launch.machine.software import code_digest
from launch.machine.system import address_toward, free_port
from launch.machine.topology import Topology, check, restrict

MARK = "hvdlaunch-facts "  # before the JSON: a login shell may print other lines


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """The facts about a host."""

    host: str  # its name in the host list
    hostname: str | None  # its own host name; None if the host was not probed
    topology: Topology
    mpi: Mpi | None = None
    address: str | None = None  # where it was reached; None on this host, and over IPv6
    port: int | None = None  # a free port on the host
    condition: Condition | None = None  # None: not requested
    other_version: str | None = None  # of the project on the host, if it differs from this one


def probe_command(python: str, mpirun: str, *, gpus: bool, inspection: Inspection | None = None) -> list[str]:
    """Return the command that prints the facts of the host on which it runs."""
    seen = () if inspection is None else (inspection.token or "", inspection.program or "", *inspection.folders)
    which = "gpus" if gpus else "none"
    return [python, "-P", "-m", "launch.hosts.host_facts", mpirun, which, *seen]


def local_facts(mpi: Mpi | None, *, gpus: bool, inspection: Inspection | None = None) -> HostFacts:
    """Return the facts of this host; without `gpus` GPUs are not searched.

    GPUs outside CUDA_VISIBLE_DEVICES, if it is set on this host, count as taken: it is the host's, or a Slurm step's.
    """
    topology = local_topology(gpus=gpus)
    return HostFacts(
        host="localhost",
        hostname=socket.gethostname(),
        topology=restrict(topology, os.environ.get(nvidia.VISIBLE)),
        mpi=mpi,
        address=_reached(os.environ),
        port=free_port(),
        condition=None if inspection is None else read_condition(inspection),
    )


def _reached(environment: Mapping[str, str]) -> str | None:
    """Return the IPv4 address of this host at which ssh or srun has reached it."""
    connection = environment.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return None if ":" in connection[2] else connection[2]
    asker = environment.get("SLURM_LAUNCH_NODE_IPADDR", ":")  # srun's
    try:
        return None if ":" in asker else address_toward(asker)
    except OSError:
        return None


def version() -> str:
    """Return a digest of this package's code: ranks with other code may read plans differently."""
    return code_digest("launch")


def facts_to_json(facts: HostFacts) -> str:
    """Convert the facts to a line of JSON; `facts_from_json` is the inverse, with the prober's name for the host."""
    report = dataclasses.asdict(facts)
    del report["host"], report["other_version"]
    return json.dumps({"version": version(), **report})


def facts_from_json(
    text: str, host: str, ours: str, *, inspection: Inspection | None = None, any_version: bool = False
) -> HostFacts:
    """Parse the facts of a host from its output; HostError if it is not a report of `ours`, this version.

    If an `inspection` was requested, its condition must match it. With `any_version`, a readable report of another
    version is accepted.
    """
    theirs: object = ours
    try:
        value = documents.parse(text)
        if isinstance(value, dict):
            theirs = value.pop("version", None)
            if theirs != ours and not (any_version and isinstance(theirs, str)):
                raise other_version(host, theirs, ours)
            value |= {"host": host, "other_version": None if theirs == ours else theirs}
        facts: HostFacts = decode(value, HostFacts, "its report")
        _check(facts, inspection)
    except (TopologyError, ValueError) as error:
        if theirs != ours:
            raise other_version(host, theirs, ours) from error
        why = str(error) if isinstance(error, TopologyError) else f"its report is none: {short(str(error))}"
        raise HostError(
            f"host {host}: {why}: see what `python -m launch.hosts.host_facts mpirun gpus` prints there"
        ) from error
    return facts


def other_version(host: str, their_version: object, ours: str) -> HostError:
    """Return the error about a host with other code of the project."""
    other = "an older version" if their_version is None else f"version {short(their_version)}"
    return HostError(f"host {host}: it has {other} of the project, here it is {ours!r}: install the same version there")


def _check(facts: HostFacts, inspection: Inspection | None) -> None:
    check(facts.topology, "its report.topology")
    if not facts.hostname:
        raise TopologyError("its report.hostname: expected a name, found none")
    if facts.port is not None and not 0 < facts.port < 1 << 16:
        raise TopologyError(f"its report.port: expected one from 1 to 65535, found {facts.port}")
    wanted, count = len(inspection.folders) if inspection else 0, len(facts.condition.folders) if facts.condition else 0
    if inspection is not None and count != wanted:
        raise TopologyError(f"its report.condition: expected one with {wanted} folders, found {count}")
    try:
        IPv4Address(facts.address or "0.0.0.0")  # noqa: S104 (it stands for none)
    except ValueError:
        raise TopologyError(f"its report.address: expected one as 10.0.0.3, found {short(facts.address)}") from None


def main(mpirun: str, gpus: str, token: str | None = None, program: str = "", *folders: str) -> None:
    """Print this host's facts."""
    inspection = None if token is None else Inspection(folders=folders, token=token or None, program=program or None)
    try:
        facts = local_facts(read_mpi(mpirun), gpus=gpus == "gpus", inspection=inspection)
    except LaunchError as error:
        sys.exit(f"hvdlaunch: error: {error}")
    print(f"{MARK}{facts_to_json(facts)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
