"""From a requested run to one that is ready to start: ask, decide, render; nothing is started."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from launch.probe.host_facts import HostFacts
from launch.start.decide import decide
from launch.start.facts import ask
from launch.start.render import PreparedRun, render
from launch.start.request import RunRequest, check, listed


def prepare(
    request: RunRequest, environment: Mapping[str, str], folder: Path, known: Mapping[str, HostFacts] | None = None
) -> PreparedRun:
    """The run, ready to start; LaunchError where it cannot be started as requested.

    With `known` facts of the hosts none is asked.
    """
    check(request, listed(request, environment), environment)
    facts = ask(request, environment, folder, known)
    return render(decide(request, facts, environment, job=job_of(environment)), facts.launcher)


def job_of(environment: Mapping[str, str]) -> str:
    """The name of the run: the user's, or the time, with an end that keeps runs of the same second apart."""
    return environment.get("HVDLAUNCH_JOB") or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
