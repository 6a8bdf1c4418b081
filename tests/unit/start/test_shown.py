from dataclasses import replace

from launch.placement.slots import place
from launch.start.shown import plan_text, shell_line
from tests.unit.machines import hosts, machine, with_ports
from tests.unit.start.specs import rendered

TWO = {"h1": with_ports(machine(), mlx5_0="down", mlx5_1="down"), "h2": machine()}


def prepared(where=None, *, gpus="all", **changes):
    where = where or hosts(h1=2, h2=1)
    np = sum(host.slots for host in where)
    interfaces = {"h1": "eth0", "h2": "ens5"} if len(where) > 1 else {}
    slots = place(where, TWO, np=np, gpus=gpus, binding="numa", interfaces=interfaces)
    given = {"environment": {"PATH": "/bin", "TOKEN": "s3cret!"}, "exports": ("HVDLAUNCH_PLAN", "PATH")}
    return rendered(where=where, slots=slots, program=("prog", "it's"), **given, **changes)


def blocks(text):
    """What stands under each title; the table is under none."""
    found, title = {None: []}, None
    for line in text.splitlines():
        if line.startswith("# "):
            title = line[2:]
        found.setdefault(title, []).append(line)
    return {title: [line for line in some if line and not line.startswith("# ")] for title, some in found.items()}


def test_a_plan_is_a_table_the_files_the_variables_and_the_command():
    run = prepared()
    found = blocks(plan_text(run))
    table, hostfile, rankfile, names, line = found.values()
    assert table == [
        "rank  host  local rank  GPU  UUID      NUMA  cores  NIC",
        "0     h1    0           0    GPU-0000  0     0-7    eth0,^mlx5_0:1,^mlx5_1:1",
        "1     h1    1           2    GPU-2222  1     8-15   eth0,^mlx5_0:1,^mlx5_1:1",
        "2     h2    0           0    GPU-0000  0     0-7    ens5",
    ]
    assert hostfile == ["h1 slots=2", "h2 slots=1"]
    assert rankfile == ["rank 0=h1 slot=0", "rank 1=h1 slot=1", "rank 2=h2 slot=0"]
    assert names == ["HVDLAUNCH_PLAN, PATH"]
    assert line == [shell_line(run)]
    assert "s3cret!" not in plan_text(run)
    known = replace(run, plan=replace(run.plan, executable="/env/bin/prog"))
    assert blocks(plan_text(known))["program"] == ["/env/bin/prog"]


def test_what_is_not_there_is_a_dash_and_what_is_not_known_says_so():
    run = prepared(hosts(h1=1), gpus="none", remarks=("note: no GPU found, running on CPU",))
    unbound = tuple(replace(slot, cores=(), numa=()) for slot in run.plan.slots)
    found = plan_text(replace(run, plan=replace(run.plan, slots=unbound))).splitlines()
    assert found[0] == "note: no GPU found, running on CPU"
    assert found[2].split() == ["0", "h1", "0", "-", "-", "unknown", "any", "-"]
