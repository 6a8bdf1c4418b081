"""From a requested run to one that is ready to start: probe, decide, render; nothing is started."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launch.hosts.connect import try_networks
from launch.hosts.host_facts import HostFacts
from launch.machine.mpi import first, from_environment
from launch.placement import network
from launch.run.start.decide import allot, decide
from launch.run.start.facts import ask
from launch.run.start.render import PreparedRun, render
from launch.run.start.request import RunRequest, check, listed

# A user who sets one of these has chosen a network: no other is tried, and ours is the one that ssh uses.
OF_NCCL, OF_OPEN_MPI = "NCCL_SOCKET_IFNAME", "btl_tcp_if_include"


def prepare(
    request: RunRequest, environment: Mapping[str, str], folder: Path, known: Mapping[str, HostFacts] | None = None
) -> PreparedRun:
    """Prepare a run; LaunchError if it cannot be started as requested.

    If the facts of the hosts are `known`, no host is probed.
    """
    check(request, listed(request, environment), environment)
    facts = ask(request, environment, folder, known)
    used = {host: facts.answers[host] for host in allot(request, facts)[1]}
    shared = shared_network(used, request, environment, folder, local=facts.local, own_addresses=facts.own_addresses)
    plan = decide(request, facts, shared, environment, job=job_of(environment))
    return replace(render(plan, facts.launcher), answers=facts.answers)


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


def job_of(environment: Mapping[str, str]) -> str:
    """Return the name of the run: the user's, or the time with a suffix that distinguishes runs of the same second."""
    return environment.get("HVDLAUNCH_JOB") or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
