import random
import socket
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.insight.tracking.environment import read_plan
from launch.errors import CommandError
from launch.placement.slots import place, rank_environment
from launch.run.rank import bind
from launch.run.start.render import render
from launch.run.start.shown import plan_text, shell_line
from tests.unit.machines import hosts, machine, with_ports
from tests.unit.run.start.specs import THREE, launcher, plan, rendered


def by_rank(run):
    return read_plan(run.environment["HVDLAUNCH_PLAN"])


def test_what_belongs_to_this_host_is_unset_where_a_launcher_exports_all():
    unset = dict.fromkeys(("HOME", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR"))
    for changes, more in (({"where": THREE, "kind": "horovodrun"}, unset), ({"kind": "horovodrun"}, {})):
        run = rendered(**changes)
        assert by_rank(run)["ranks"][0]["environment"] == {**run.plan.slots[0].environment, **more}
        assert by_rank(run)["launcher"] == "horovodrun, Open MPI 4.1.8"


WORDS = st.text("abGPU-0189_.", min_size=1, max_size=12).filter(lambda word: len(word) != 32)
UUIDS = st.uuids().map(lambda uuid: f"GPU-{uuid}") | st.uuids().map(lambda uuid: f"MIG-{uuid}") | WORDS | st.none()


@settings(max_examples=20)
@given(data=st.data())
def test_each_rank_and_the_run_folder_read_the_same_place(data):
    """Whatever ranks of a host have in common or not."""
    here = socket.gethostname()
    draw = data.draw
    slots = [
        replace(
            slot,
            gpu=draw(st.none() | st.integers(0, 3)),
            gpu_uuid=draw(UUIDS),
            shared=draw(st.booleans()),
            numa=tuple(draw(st.sets(st.integers(0, 3)))),
            cores=tuple(sorted(draw(st.sets(st.integers(0, 40))))),
            threads=draw(st.none() | st.integers(1, 2)),
            environment=draw(st.dictionaries(st.sampled_from(["A", "B"]), st.none() | st.sampled_from(["x", "y z"]))),
        )
        for slot in plan(THREE).slots
    ]
    made = plan(THREE, slots=tuple(slots), hostnames=dict.fromkeys(["h1", "h2.cluster.example"], here))
    text = render(made, launcher()).environment["HVDLAUNCH_PLAN"]
    for slot, rank in zip(slots, read_plan(text)["ranks"], strict=True):
        for name in ("rank", "host", "local_rank", "gpu", "gpu_uuid", "threads", "environment"):
            assert rank[name] == getattr(slot, name)
        assert tuple(rank["numa"]) == slot.numa
        own = bind.own_slot({"HVDLAUNCH_PLAN": text, "OMPI_COMM_WORLD_RANK": str(slot.rank)})
        torch = {"RANK": str(slot.rank), "LOCAL_RANK": str(slot.local_rank), **made.rendezvous}
        assert own["cores"] == set(slot.cores)
        assert own["environment"].items() >= {**torch, **slot.environment}.items()
        on_host = [(one.gpu, one.gpu_uuid) for one in slots if one.host == slot.host]
        assert [(one["gpu"], one["gpu_uuid"]) for one in own["on_host"]] == on_host


UNFIT = tuple(f"mlx5_{i}:2" for i in range(8))


def large(count, gpus):
    """A plan of so many hosts, with random UUIDs and names that a cloud gives."""
    chance = random.Random(0)  # noqa: S311
    names = [f"ip-10-{n // 250}-{n % 250}-{chance.randrange(256)}" for n in range(count)]
    base = plan(hosts(one=4))
    slots = tuple(
        replace(
            base.slots[local % 4],
            rank=gpus * n + local,
            host=name,
            local_rank=local,
            gpu=local,
            gpu_uuid=f"GPU-{UUID(int=chance.getrandbits(128))}",
            cores=(*range(16 * local, 16 * local + 16), *range(128 + 16 * local, 144 + 16 * local)),
            interface="eth0",
            unfit_ports=UNFIT,
            environment=rank_environment(32, "eth0", UNFIT, ()),
        )
        for n, name in enumerate(names)
        for local in range(gpus)
    )
    return replace(base, slots=slots, hostnames={name: f"{name}.ec2.internal" for name in names})


def test_the_plan_of_4096_ranks_fits_into_a_variable_and_a_larger_one_is_refused_in_one_line():
    assert len(by_rank(render(large(1024, 4), launcher()))["ranks"]) == 4096
    end = "a variable holds 131072: start fewer ranks, or mpirun itself with what hvdlaunch hostfile writes"
    with pytest.raises(CommandError, match=f"^the plan of 8192 ranks takes 2.*{end}$"):
        render(large(1024, 8), launcher())


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
