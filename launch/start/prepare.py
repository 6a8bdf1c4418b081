"""From a requested run to one that is ready to start: ask, decide, render; nothing is started."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from launch.reach.probe import HostFacts
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
    # The last part keeps runs apart that start in the same second.
    job = environment.get("HVDLAUNCH_JOB") or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    return render(decide(request, facts, environment, job=job), facts.launcher)
