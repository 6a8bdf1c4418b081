"""The networks that the hosts of a run may use, tried by connections between the hosts."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.machine.mpi import Parameter, first, from_environment
from launch.placement import network
from launch.probe.connect import try_networks
from launch.probe.host_facts import HostFacts
from launch.probe.ssh import Ssh

# A user who sets one of these has chosen a network: no other is tried, and ours is the one that ssh uses.
OF_NCCL, OF_OPEN_MPI = "NCCL_SOCKET_IFNAME", "btl_tcp_if_include"


def shared_network(
    used: Mapping[str, HostFacts],
    wanted: str | None,
    *,
    local: frozenset[str],
    own_addresses: Mapping[str, str],
    tried: Mapping[str, str],
) -> network.SharedNetwork | None:
    """Return the network that the hosts share; None for this host only, or for hosts that were not probed."""
    known, reached = _seen(used, local, own_addresses)
    return network.shared_network(known, reached, wanted, tried) if known else None


def try_candidates(
    used: Mapping[str, HostFacts],
    wanted: str | None,
    *,
    local: frozenset[str],
    own_addresses: Mapping[str, str],
    environment: Mapping[str, str],
    parameters: Sequence[Parameter],
    ssh: Ssh,
    folder: Path,
) -> dict[str, str]:
    """Try the candidates; return why each does not connect the hosts, or "" if it does; empty if nothing is open."""
    known, reached = _seen(used, local, own_addresses)
    if len(known) < 2 or wanted is not None:
        return {}
    candidates = network.candidates(known, reached)
    if len(candidates) == 1 and candidates[0].by_ssh:
        return {}
    if environment.get(OF_NCCL) or first((*from_environment(environment), *parameters), (OF_OPEN_MPI,)):
        others = [candidate.name for candidate in candidates if not candidate.by_ssh]
        return dict.fromkeys(others, "not tried") if len(others) < len(candidates) else {}
    failures = try_networks(
        [{host: str(network.address_of(own)) for host, own in one.interfaces.items()} for one in candidates],
        {host: used[host].port or 0 for host in known},
        local=local,
        ssh=ssh,
        python=sys.executable,
        folder=str(folder),
    )
    return {candidate.name: why for candidate, why in zip(candidates, failures, strict=True)}


def _seen(
    used: Mapping[str, HostFacts], local: frozenset[str], own_addresses: Mapping[str, str]
) -> tuple[network.Hosts, dict[str, str]]:
    """Return the interfaces of each host that was probed, and where ssh has reached it; none if all are this host."""
    known = {host: answer.topology.interfaces for host, answer in used.items() if answer.hostname is not None}
    if known.keys() <= local:
        return {}, {}
    reached = {host: answer.address for host, answer in used.items() if answer.address}
    our_address = next((own_addresses[host] for host in reached if host in own_addresses), None)
    if our_address is not None:
        reached |= dict.fromkeys(local & known.keys(), our_address)
    return known, reached
