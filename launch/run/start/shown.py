"""Formats a prepared run for the user: which rank runs where, the files and the command."""

import shlex

from launch.cores import core_list
from launch.errors import harmless
from launch.hosts import hostfile
from launch.machine.show.table import aligned
from launch.placement.findings import named
from launch.placement.rank_map import describe_gain
from launch.placement.slots import hosts_of
from launch.placement.traffic import Traffic, flows, on_host
from launch.run.start.plan import Plan
from launch.run.start.render import PreparedRun


def plan_text(prepared: PreparedRun) -> str:
    """Describe everything that the run would do; the command is at the end, in shell syntax."""
    slots = prepared.plan.slots
    size = prepared.plan.request.ranks_per_replica
    header = ["rank", "host", "local rank", "GPU", "UUID", "NUMA", "cores", "NIC"]
    rows = [[*header, "group", "place"] if size else header]
    for slot in slots:
        nics = [*([slot.interface] if slot.interface else []), *(f"^{port}" for port in slot.unfit_ports)]
        gpu = "-" if slot.gpu is None else str(slot.gpu)
        rows.append(
            [
                str(slot.rank),
                slot.host,
                str(slot.local_rank),
                gpu,
                slot.gpu_uuid or "-",
                core_list(slot.numa) or "unknown",
                core_list(slot.cores) or "any",
                ",".join(nics) or "-",
                *([str(slot.rank // size), str(slot.rank % size)] if size else []),
            ]
        )
    hosts = hosts_of(slots)
    traffic = prepared.plan.request.traffic
    parts = {
        **({} if traffic is None else {"what the map of ranks to GPUs gains": gains_text(prepared.plan, traffic)}),
        "hostfile": hostfile.write(hosts, "openmpi"),
        "rankfile, for mpirun without hvdlaunch: it binds each rank to one core": hostfile.write(hosts, "rankfile"),
        **({} if prepared.plan.executable is None else {"program": harmless(prepared.plan.executable) + "\n"}),
        "given to every rank": ", ".join(prepared.plan.exports) + "\n",
        "command": shell_line(prepared) + "\n",
    }
    remarks = "".join(f"{harmless(remark)}\n" for remark in prepared.plan.remarks)
    return "\n".join([remarks + aligned(rows), "", *(f"# {title}\n{text}" for title, text in parts.items())]).rstrip()


def shell_line(prepared: PreparedRun) -> str:
    """Return the command in shell syntax, with the variables that it needs."""
    plan = prepared.plan
    names = (*plan.settings, *prepared.launcher.variables(plan), "HVDLAUNCH_PLAN", "HVDLAUNCH_JOB")
    settings = [f"{name}={shlex.quote(prepared.environment[name])}" for name in names]
    return " ".join([*settings, "HVDLAUNCH_REPORT=", shlex.join(prepared.argv)])


def gains_text(plan: Plan, traffic: Traffic) -> str:
    """Return a line about the gain of the rank map for each host, and for hosts that are alike."""
    sent = flows(traffic, len(plan.slots))
    lines: dict[str, list[str]] = {}
    for host in hosts_of(plan.slots):
        own = [slot for slot in plan.slots if slot.host == host.name]
        if gpus := [slot.gpu for slot in own if slot.gpu is not None]:
            of_host = [on_host(flow, own[0].rank, len(own)) for flow in sent]
            lines.setdefault(describe_gain(plan.topologies[host.name], gpus, of_host), []).append(host.name)
    return "".join(f"{named(names)}: {line}\n" for line, names in lines.items())
