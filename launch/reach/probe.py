"""What a host answers: its GPUs, NICs and cores, and its MPI; it is only read.

python -m launch.reach.probe MPIRUN gpus|none [VISIBLE]       the answer as one line of JSON
"""

import dataclasses
import json
import os
import socket
import sys
from dataclasses import dataclass

from launch.errors import LaunchError
from launch.machine.local import local_topology
from launch.machine.mpi import Mpi, read_mpi
from launch.machine.topology import Topology, from_json, restrict, to_json

MARK = "hvdlaunch-facts "  # before the JSON: a shell there may print other lines


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a host answered."""

    host: str  # its name in the list of hosts
    hostname: str | None  # what it calls itself; None if the host was not asked
    topology: Topology
    mpi: Mpi | None = None
    address: str | None = None  # where ssh reached it; None on this host, and over IPv6


def probe_words(python: str, mpirun: str, *, gpus: bool, visible: str | None) -> list[str]:
    """The command that prints a host's facts there."""
    words = [python, "-P", "-m", "launch.reach.probe", mpirun, "gpus" if gpus else "none"]
    return words if visible is None else [*words, visible]


def local_facts(mpi: Mpi | None, *, gpus: bool, visible: str | None) -> HostFacts:
    """The facts of this host; GPUs outside `visible` count as taken, without `gpus` none is looked for."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return HostFacts(
        host="localhost",
        hostname=socket.gethostname(),
        topology=restrict(local_topology(gpus=gpus), visible),
        mpi=mpi,
        address=connection[2] if len(connection) == 4 and ":" not in connection[2] else None,
    )


def facts_to_json(facts: HostFacts) -> str:
    """The facts as one line of JSON; `facts_from_json` gives them back, under the asking side's name for the host."""
    mpi = None if facts.mpi is None else dataclasses.asdict(facts.mpi)
    return json.dumps(
        {"hostname": facts.hostname, "mpi": mpi, "address": facts.address, "topology": to_json(facts.topology)}
    )


def facts_from_json(text: str, host: str) -> HostFacts:
    """The facts of a host from what it has printed."""
    facts = json.loads(text)
    mpi = facts["mpi"]
    return HostFacts(
        host=host,
        hostname=facts["hostname"],
        topology=from_json(facts["topology"]),
        mpi=None if mpi is None else Mpi(**{**mpi, "version": tuple(mpi["version"])}),
        address=facts["address"],
    )


def main(mpirun: str, gpus: str, visible: str | None = None) -> None:
    """Print this host's facts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", visible)
    try:
        facts = local_facts(read_mpi(mpirun), gpus=gpus == "gpus", visible=visible)
    except LaunchError as error:
        sys.exit(f"hvdlaunch: {error}")
    print(f"{MARK}{facts_to_json(facts)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
