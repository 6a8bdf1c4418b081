"""A prepared run as text for a person: who runs where, the files and the command."""

import shlex

from launch.cores import core_list
from launch.errors import harmless
from launch.hosts import hostfile
from launch.machine.show.table import aligned
from launch.start.command import hosts_of
from launch.start.render import PreparedRun


def plan_text(prepared: PreparedRun) -> str:
    """Everything that the run would do; the command stands last, as a shell takes it."""
    slots = prepared.plan.slots
    size = prepared.plan.ranks_per_replica
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
    parts = {
        "hostfile": hostfile.write(hosts, "openmpi"),
        "rankfile, for mpirun without hvdlaunch: it binds each rank to one core": hostfile.write(hosts, "rankfile"),
        "given to every rank": ", ".join(prepared.plan.exports) + "\n",
        "command": shell_line(prepared) + "\n",
    }
    remarks = "".join(f"{harmless(remark)}\n" for remark in prepared.plan.remarks)
    return "\n".join([remarks + aligned(rows), "", *(f"# {title}\n{text}" for title, text in parts.items())]).rstrip()


def shell_line(prepared: PreparedRun) -> str:
    """The command as a shell would take it, with the variables that it needs."""
    settings = [f"{name}={shlex.quote(prepared.environment[name])}" for name in ("HVDLAUNCH_PLAN", "HVDLAUNCH_JOB")]
    return " ".join([*settings, "HVDLAUNCH_REPORT=", shlex.join(prepared.argv)])
