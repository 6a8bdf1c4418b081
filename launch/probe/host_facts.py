"""The facts about a host: its GPUs, NICs and cores, and its MPI; nothing on it is changed.

python -m launch.probe.host_facts MPIRUN gpus|none SECONDS [TOKEN PROGRAM FOLDER...]       prints one line of JSON

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

from launch.errors import HostError, LaunchError, TopologyError
from launch.machine.condition import Condition, Look, read_condition
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


def probe_command(
    python: str, mpirun: str, *, gpus: bool, driver_timeout_s: float, look: Look | None = None
) -> list[str]:
    """Return the command that prints the facts of the host on which it runs."""
    seen = () if look is None else (look.token or "", look.program or "", *look.folders)
    return [
        python,
        "-P",
        "-m",
        "launch.probe.host_facts",
        mpirun,
        "gpus" if gpus else "none",
        f"{driver_timeout_s:g}",
        *seen,
    ]


def local_facts(mpi: Mpi | None, *, gpus: bool, driver_timeout_s: float, look: Look | None = None) -> HostFacts:
    """Return the facts of this host; without `gpus` GPUs are not searched.

    GPUs outside CUDA_VISIBLE_DEVICES, if it is set on this host, count as taken: it is the host's, or a Slurm step's.
    """
    return HostFacts(
        host="localhost",
        hostname=socket.gethostname(),
        topology=restrict(
            local_topology(gpus=gpus, timeout_s=driver_timeout_s), os.environ.get("CUDA_VISIBLE_DEVICES")
        ),
        mpi=mpi,
        address=_reached(os.environ),
        port=free_port(),
        condition=None if look is None else read_condition(look),
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


@dataclass(frozen=True, kw_only=True)
class Report:
    """The serialized facts."""

    version: str  # of the project on that host
    hostname: str
    address: str | None
    port: int | None
    mpi: Mpi | None
    topology: Topology
    condition: Condition | None


def version() -> str:
    """Return a digest of this package's code: ranks with other code may read plans differently."""
    return code_digest("launch")


def facts_to_json(facts: HostFacts) -> str:
    """Convert the facts to a line of JSON; `facts_from_json` is the inverse, with the prober's name for the host."""
    assert facts.hostname is not None
    report = Report(
        version=version(),
        hostname=facts.hostname,
        address=facts.address,
        port=facts.port,
        mpi=facts.mpi,
        topology=facts.topology,
        condition=facts.condition,
    )
    return json.dumps(dataclasses.asdict(report))


def facts_from_json(
    text: str, host: str, ours: str, *, look: Look | None = None, any_version: bool = False
) -> HostFacts:
    """Parse the facts of a host from its output; HostError if it is not a report of `ours`, this version.

    If a `look` was requested, its condition must match it. With `any_version`, a readable report of another version is
    accepted.
    """
    their_version: object = ours
    try:
        value = json.loads(text)
        if isinstance(value, dict) and (their_version := value.get("version")) != ours and not any_version:
            raise other_version(host, their_version, ours)
        report: Report = decode(value, Report, "its report")
        _check(report, look)
    except (TopologyError, ValueError, RecursionError) as error:
        if their_version != ours:
            raise other_version(host, their_version, ours) from error
        why = str(error) if isinstance(error, TopologyError) else f"its report is none: {short(str(error))}"
        raise HostError(
            f"host {host}: {why}: see what `python -m launch.probe.host_facts mpirun gpus 10` prints there"
        ) from error
    return HostFacts(
        host=host,
        hostname=report.hostname,
        topology=report.topology,
        mpi=report.mpi,
        address=report.address,
        port=report.port,
        condition=report.condition,
        other_version=None if report.version == ours else report.version,
    )


def other_version(host: str, their_version: object, ours: str) -> HostError:
    """Return the error about a host with other code of the project."""
    other = "an older version" if their_version is None else f"version {short(their_version)}"
    return HostError(f"host {host}: it has {other} of the project, here it is {ours!r}: install the same version there")


def _check(report: Report, look: Look | None) -> None:
    check(report.topology, "its report.topology")
    if not report.hostname:
        raise TopologyError("its report.hostname: expected a name, found none")
    if report.port is not None and not 0 < report.port < 1 << 16:
        raise TopologyError(f"its report.port: expected one from 1 to 65535, found {report.port}")
    folder_count = 0 if report.condition is None else len(report.condition.folders)
    if look is not None and folder_count != len(look.folders):
        raise TopologyError(
            f"its report.condition: expected one with {len(look.folders)} folders, found {folder_count}"
        )
    if report.address is None:
        return
    try:
        IPv4Address(report.address)
    except ValueError:
        raise TopologyError(f"its report.address: expected one as 10.0.0.3, found {short(report.address)}") from None


def main(
    mpirun: str, gpus: str, driver_timeout_s: str, token: str | None = None, program: str = "", *folders: str
) -> None:
    """Print this host's facts."""
    look = None if token is None else Look(folders=folders, token=token or None, program=program or None)
    try:
        facts = local_facts(read_mpi(mpirun), gpus=gpus == "gpus", driver_timeout_s=float(driver_timeout_s), look=look)
    except LaunchError as error:
        sys.exit(f"hvdlaunch: error: {error}")
    print(f"{MARK}{facts_to_json(facts)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
