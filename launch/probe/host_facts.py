"""What a host answers: its GPUs, NICs and cores, and its MPI; it is only read.

python -m launch.probe.host_facts MPIRUN gpus|none SECONDS [TOKEN FOLDER...]       the answer as one line of JSON

Its GPU driver may take so many seconds. With a token (none: an empty word) and folders it also tells its condition.
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

MARK = "hvdlaunch-facts "  # before the JSON: a shell there may print other lines


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a host answered."""

    host: str  # its name in the list of hosts
    hostname: str | None  # what it calls itself; None if the host was not asked
    topology: Topology
    mpi: Mpi | None = None
    address: str | None = None  # where it was reached; None on this host, and over IPv6
    port: int | None = None  # one on which nobody listens there
    condition: Condition | None = None  # None: nobody has asked
    other_version: str | None = None  # of the project there, where it is not the one here


def probe_command(
    python: str, mpirun: str, *, gpus: bool, driver_timeout_s: float, look: Look | None = None
) -> list[str]:
    """The command that prints a host's facts there."""
    seen = () if look is None else (look.token or "", *look.folders)
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
    """The facts of this host; without `gpus` none is looked for.

    GPUs outside CUDA_VISIBLE_DEVICES, where it is set here, count as taken: each host has its own, or a Slurm step's.
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
    """The IPv4 address of this host at which ssh or srun has reached it."""
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
    """The facts as they travel."""

    version: str  # of the project on that host
    hostname: str
    address: str | None
    port: int | None
    mpi: Mpi | None
    topology: Topology
    condition: Condition | None


def version() -> str:
    """A digest of this package's code: ranks with another one may read plans differently."""
    return code_digest("launch")


def facts_to_json(facts: HostFacts) -> str:
    """The facts as one line of JSON; `facts_from_json` gives them back, under the asking side's name for the host."""
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
    """The facts of a host from what it has printed; HostError where that is no report of `ours`, this version.

    With the `look` that it was asked for its condition must be one of them. A report of `any_version` that can be read
    is taken if it may be.
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
    """The error about a host whose code of the project is another one than here."""
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


def main(mpirun: str, gpus: str, driver_timeout_s: str, token: str | None = None, *folders: str) -> None:
    """Print this host's facts."""
    look = None if token is None else Look(folders=folders, token=token or None)
    try:
        facts = local_facts(read_mpi(mpirun), gpus=gpus == "gpus", driver_timeout_s=float(driver_timeout_s), look=look)
    except LaunchError as error:
        sys.exit(f"hvdlaunch: error: {error}")
    print(f"{MARK}{facts_to_json(facts)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
