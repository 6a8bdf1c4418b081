"""A run that is ready, as text for a person: who runs where, the files, the environment and the command."""

import shlex

from launch.cores import core_list
from launch.hosts import hostfile
from launch.machine.show.table import aligned
from launch.start import command
from launch.start.prepare import Ready

OURS = ("HVDLAUNCH_PLAN", "HVDLAUNCH_JOB")


def show(ready: Ready) -> str:
    """Everything that a run would do, and does not."""
    slots = ready.order.slots
    rows = [["rank", "host", "local rank", "GPU", "UUID", "NUMA", "cores", "NIC"]]
    for slot in slots:
        nics = [name for name in (ready.interfaces.get(slot.host), *ready.adapters.get(slot.host, ())) if name]
        gpu = "-" if slot.gpu is None else str(slot.gpu)
        rows.append(
            [
                str(slot.rank),
                slot.host,
                str(slot.local_rank),
                gpu,
                slot.gpu_uuid or "-",
                core_list(slot.numa) or "-",
                core_list(slot.cores) or "any",
                ",".join(nics) or "-",
            ]
        )
    hosts = command.hosts(slots)
    parts = {
        "hostfile": hostfile.write(hosts, "openmpi"),
        "rankfile, for mpirun without hvdlaunch: it binds each rank to one core": hostfile.write(hosts, "rankfile"),
        "environment": "".join(f"{name}={shlex.quote(ready.environment[name])}\n" for name in OURS)
        + f"given to every rank: {', '.join(ready.order.exports)}\n",
        "command": shlex.join(ready.argv) + "\n",
    }
    remarks = "".join(f"{remark}\n" for remark in ready.remarks)
    return "\n".join([remarks + aligned(rows), "", *(f"# {title}\n{text}" for title, text in parts.items())]).rstrip()


def shell_line(ready: Ready) -> str:
    """The command as a shell would take it, with the variables that it needs."""
    settings = [f"{name}={shlex.quote(ready.environment[name])}" for name in OURS]
    return " ".join([*settings, "HVDLAUNCH_REPORT=", shlex.join(ready.argv)])
