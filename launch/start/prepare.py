"""From a requested run to one that is ready to start: probe, decide, render; nothing is started."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from launch.probe.host_facts import HostFacts
from launch.start.decide import allot, decide
from launch.start.facts import ask
from launch.start.networks import shared_network
from launch.start.render import PreparedRun, render
from launch.start.request import RunRequest, check, listed


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
    return render(decide(request, facts, shared, environment, job=job_of(environment)), facts.launcher)


def job_of(environment: Mapping[str, str]) -> str:
    """Return the name of the run: the user's, or the time with a suffix that distinguishes runs of the same second."""
    return environment.get("HVDLAUNCH_JOB") or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
