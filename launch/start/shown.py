"""Formats a prepared run for the user: which rank runs where, the files and the command."""

import shlex
from collections import Counter
from collections.abc import Iterator

from launch.cores import core_list
from launch.errors import harmless
from launch.hosts import hostfile
from launch.machine.show.table import aligned, link_word
from launch.placement.findings import named
from launch.placement.rank_map import describe_gain, link_loads
from launch.placement.traffic import Flow, Traffic, flows, on_host
from launch.start.command import hosts_of
from launch.start.plan import Plan
from launch.start.render import PreparedRun


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
        **({} if traffic is None else {"what links carry in a step, one way": traffic_text(prepared.plan, traffic)}),
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


def traffic_text(plan: Plan, traffic: Traffic) -> str:
    """Return the bytes of each link between GPUs and between hosts, and the gain of the rank map on each host."""
    sent = flows(traffic, len(plan.slots))
    rows: dict[tuple[tuple[str, ...], ...], list[str]] = {}  # identical hosts share a row
    lines: dict[str, list[str]] = {}
    for host in hosts_of(plan.slots):
        own = [slot for slot in plan.slots if slot.host == host.name]
        gpus = [slot.gpu for slot in own if slot.gpu is not None]
        if not gpus:
            continue
        inside, between = (on_host(flow, own[0].rank, len(own)) for flow in sent)
        topology = plan.topologies[host.name]
        table = tuple(
            (
                f"GPU {load.gpus[0]} and {load.gpus[1]}",
                link_word(load.link),
                "unknown" if load.link.gbps is None else f"{load.link.gbps:g}",
                _mb(load.inside_bytes),
                _mb(load.between_bytes),
            )
            for load in link_loads(topology, gpus, (inside, between))
        )
        rows.setdefault(table, []).append(host.name)
        lines.setdefault(describe_gain(topology, gpus, (inside, between)), []).append(host.name)
    cells = [["host", "link", "kind", "GB/s", "in replicas", "between replicas"]]
    cells += [[named(names) if n == 0 else "", *row] for table, names in rows.items() for n, row in enumerate(table)]
    cells += _between_hosts(plan, sent)
    gains = [f"{named(names)}: {line}" for line, names in lines.items()]
    return "\n".join([aligned(cells), *gains]) + "\n"


def _between_hosts(plan: Plan, sent: tuple[Flow, Flow]) -> Iterator[list[str]]:
    """Yield a row for every two hosts that exchange data, in the direction that carries more."""
    host_of = [slot.host for slot in plan.slots]
    carried = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
    for flow, count in zip(sent, carried, strict=True):
        for (rank, other), size in flow.items():
            count[host_of[rank], host_of[other]] += round(size)
    pairs = dict.fromkeys((min(pair), max(pair)) for count in carried for pair in count if pair[0] != pair[1])
    for first, second in pairs:
        most = [max(count[first, second], count[second, first]) for count in carried]
        yield [first, f"to {second}", "network", "-", *map(_mb, most)]


def _mb(size: float) -> str:
    return f"{size / 1e6:.4g} MB"
