"""The network that the hosts of a run use, tried by connections between the hosts."""

import sys
from collections.abc import Mapping
from pathlib import Path

from launch.machine.mpi import first, from_environment
from launch.placement import network
from launch.probe.connect import try_networks
from launch.probe.host_facts import HostFacts
from launch.start.request import RunRequest

# A user who sets one of these has chosen a network: no other is tried, and ours is the one that ssh uses.
OF_NCCL, OF_OPEN_MPI = "NCCL_SOCKET_IFNAME", "btl_tcp_if_include"


def shared_network(
    used: Mapping[str, HostFacts],
    request: RunRequest,
    environment: Mapping[str, str],
    folder: Path,
    *,
    local: frozenset[str],
    own_addresses: Mapping[str, str],
) -> network.SharedNetwork | None:
    """Return the network that the hosts share; None for this host only, or for hosts that were not probed.

    Unless the user decides, the candidates are tried; PlacementError if none connects the hosts.
    """
    known = {host: answer.topology.interfaces for host, answer in used.items() if answer.hostname is not None}
    if known.keys() <= local:
        return None
    reached = {host: answer.address for host, answer in used.items() if answer.address}
    our_address = next((own_addresses[host] for host in reached if host in own_addresses), None)
    if our_address is not None:
        reached |= dict.fromkeys(local & known.keys(), our_address)
    tried: dict[str, str] = {}  # network -> why it does not connect the hosts, "" if it does
    if len(known) > 1 and request.network is None:
        candidates = network.candidates(known, reached)
        others = [candidate.name for candidate in candidates if not candidate.by_ssh]
        parameters = (*from_environment(environment), *request.parameters)
        if environment.get(OF_NCCL) or first(parameters, (OF_OPEN_MPI,)):
            tried = dict.fromkeys(others, "not tried") if len(others) < len(candidates) else {}
        elif len(candidates) > 1 or others:
            failures = try_networks(
                [{host: str(network.address_of(own)) for host, own in one.interfaces.items()} for one in candidates],
                {host: used[host].port or 0 for host in known},
                local=local,
                ssh=request.ssh,
                python=sys.executable,
                folder=str(folder),
            )
            tried = {candidate.name: why for candidate, why in zip(candidates, failures, strict=True)}
    return network.shared_network(known, reached, request.network, tried)
