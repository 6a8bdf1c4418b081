"""Pure: a plan and a launcher -> the exact command and its environment."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.cores import runs_of
from launch.errors import CommandError
from launch.hosts.host_facts import HostFacts
from launch.machine.nvidia import uuid_digits
from launch.placement.slots import RankSlot
from launch.run.start.environment import OF_THIS_HOST
from launch.run.start.launchers.launcher import Launcher
from launch.run.start.plan import Plan

MAX_VARIABLE_BYTES = 128 * 1024  # MAX_ARG_STRLEN of Linux, including the name and the terminating zero


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    plan: Plan
    launcher: Launcher
    argv: list[str]
    environment: Mapping[str, str]  # of the launcher; HVDLAUNCH_REPORT is added at the start
    answers: Mapping[str, HostFacts] = field(default_factory=dict)  # of the hosts that were probed


def render(plan: Plan, launcher: Launcher) -> PreparedRun:
    """Return the launcher's command, and its environment with the plan in it."""
    ours = {"HVDLAUNCH_PLAN": packed(plan, launcher), "HVDLAUNCH_JOB": plan.job}
    return PreparedRun(
        plan=plan, launcher=launcher, argv=launcher.argv(plan), environment={**launcher.environment(plan), **ours}
    )


def packed(plan: Plan, launcher: Launcher) -> str:
    """Encode the plan for launch.run.rank.bind and hvdtrain: JSON with an entry per host, in order, zlib, base64.

    Facts that all ranks of a host share are stored once per host, the rest in its list of `ranks`.
    """
    request = plan.request
    by_host: dict[str, list[RankSlot]] = {}
    for slot in plan.slots:
        by_host.setdefault(slot.host, []).append(slot)
    # A launcher that exports everything also gives ranks on other hosts the variables of this host: unset them.
    of_this_host = dict.fromkeys(OF_THIS_HOST) if launcher.exports_all and plan.network is not None else {}
    hosts = [
        {"host": host, "hostname": plan.hostnames[host], **_entry(slots, of_this_host)}
        for host, slots in by_host.items()
    ]
    settings = [name for name in plan.exports if name.startswith("NCCL_") and name in plan.environment]
    document = {
        "launcher": str(launcher),
        "rank_variables": (launcher.rank_variable, launcher.local_rank_variable),
        "program": plan.program,
        "executable": plan.executable,
        "path": plan.environment.get("PATH"),
        "show": request.show,
        "terminals": request.terminals,
        "environment": {name: plan.environment[name] for name in settings},
        "rendezvous": dict(plan.rendezvous),
        "ranks_per_replica": request.ranks_per_replica,
        "attempt": asdict(request.attempt),
        "hosts": hosts,
    }
    packer = zlib.compressobj(9, strategy=zlib.Z_FILTERED)  # UUIDs compress better without short matches
    data = packer.compress(json.dumps(document, separators=(",", ":")).encode()) + packer.flush()
    text = base64.b64encode(data).decode()
    taken = len(f"HVDLAUNCH_PLAN={text}\0")
    if taken > MAX_VARIABLE_BYTES:
        raise CommandError(
            f"the plan of {len(plan.slots)} ranks takes {taken} bytes, a variable holds {MAX_VARIABLE_BYTES}: "
            "start fewer ranks, or mpirun itself with what hvdlaunch hostfile writes"
        )
    return text


def _entry(slots: Sequence[RankSlot], of_this_host: Mapping[str, None]) -> dict[str, Any]:
    names = ("gpu", "gpu_uuid", "numa", "threads", "interface", "unfit_ports")
    ranks: list[dict[str, Any]] = [
        {
            **{name: getattr(slot, name) for name in names},
            "cores": [(run[0], run[-1]) for run in runs_of(slot.cores)],  # so that bind does not have to parse a list
            "environment": {**slot.environment, **of_this_host},
        }
        for slot in slots
    ]
    shared = {name: value for name, value in ranks[0].items() if all(rank[name] == value for rank in ranks)}
    if digits := uuid_digits(slot.gpu_uuid for slot in slots):  # only these of each UUID: they cannot be compressed
        shared = {**shared, "gpu_uuid": None, "gpu_uuids": digits}
    own = [{name: value for name, value in rank.items() if name not in shared} for rank in ranks]
    return {**shared, "ranks": own}
