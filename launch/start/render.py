"""Pure: a plan and a launcher -> the very command and its environment."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from launch.cores import core_list
from launch.errors import CommandError
from launch.start import command
from launch.start.environment import OF_THIS_HOST
from launch.start.plan import Launcher, Plan

# One exported variable may not be longer (MAX_ARG_STRLEN of Linux); some room is left for its name.
MAX_PLAN_CHARACTERS = 128 * 1024 - 64


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    plan: Plan
    launcher: Launcher
    argv: list[str]
    environment: Mapping[str, str]  # of the launcher; HVDLAUNCH_REPORT is still missing


def render(plan: Plan, launcher: Launcher) -> PreparedRun:
    """The command of the launcher, and its environment with the plan in it."""
    ours = {"HVDLAUNCH_PLAN": plan_json(plan, launcher), "HVDLAUNCH_JOB": plan.job}
    return PreparedRun(
        plan=plan, launcher=launcher, argv=command.argv(plan, launcher), environment={**plan.environment, **ours}
    )


def plan_json(plan: Plan, launcher: Launcher) -> str:
    """The placement as JSON, for launch.rank.bind and for placement.json of the run folder."""
    # A launcher that exports all gives ranks on other hosts also what belongs to this one: that is unset.
    of_this_host = dict.fromkeys(OF_THIS_HOST) if launcher.horovodrun is not None and plan.network is not None else {}
    ranks = [
        {
            **asdict(slot),
            "cores": core_list(slot.cores),
            "hostname": plan.hostnames[slot.host],
            "environment": {**slot.environment, **of_this_host},
        }
        for slot in plan.slots
    ]
    starter = f"horovodrun, {launcher.mpi}" if launcher.horovodrun else str(launcher.mpi)
    given = [name for name in plan.exports if name.startswith("NCCL_") and name in plan.environment]
    text = json.dumps(
        {
            "launcher": starter,
            "program": plan.program,
            "environment": {name: plan.environment[name] for name in given},
            "ranks": ranks,
        },
        separators=(",", ":"),
    )
    if len(text) > MAX_PLAN_CHARACTERS:
        raise CommandError(
            f"the plan of {len(plan.slots)} ranks takes {len(text)} bytes, a variable holds "
            f"{MAX_PLAN_CHARACTERS}: start fewer ranks, or mpirun itself with what hvdlaunch hostfile writes"
        )
    return text
