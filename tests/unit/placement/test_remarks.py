from dataclasses import replace

import pytest

from launch.machine.topology import OUTSIDE
from launch.placement.remarks import crowded, gpu_remarks, left_out
from launch.placement.slots import place
from tests.unit.machines import hosts, machine

SLOW, DISPLAY = "8 of 16 PCIe lanes", "drives a display"


def with_facts(**facts):
    """The machine of four GPUs with one fact of each GPU."""
    whole = machine()
    of_gpu = [dict(zip(facts, own, strict=True)) for own in zip(*facts.values(), strict=True)]
    return replace(whole, gpus=tuple(replace(gpu, **of_gpu[gpu.index]) for gpu in whole.gpus))


BUSY, NAMED = "busy: pid 7", "used because --gpus names it"
TWO_SLOW = with_facts(drawbacks=[(SLOW,), (), (SLOW, DISPLAY), ()])


@pytest.mark.parametrize(
    ("topologies", "gpus", "lines"),
    [
        ({"a": machine(unusable={3: "busy: pid 7"})}, "all", ()),
        (
            {"a": machine(unusable={1: BUSY, 3: BUSY})},
            (1, 2, 3),
            (f"warning: GPU 1 of a, GPU 3 of a: {BUSY}, {NAMED}",),
        ),
        ({"a": TWO_SLOW}, "all", (f"warning: GPU 0 of a, GPU 2 of a: {SLOW}", f"warning: GPU 2 of a: {DISPLAY}")),
        ({"a": with_facts(drawbacks=[(), (SLOW,), (), ()])}, (0, 2, 3), ()),  # it is not chosen
        (
            {"a": with_facts(name=["A100"] * 4), "b": with_facts(name=["L4\x1b"] * 4)},
            (0,),
            ("warning: unlike GPUs, each step waits for the slowest: A100 (GPU 0 of a); L4\\x1b (GPU 0 of b)",),
        ),
    ],
)
def test_tells_of_the_gpus_that_were_chosen(topologies, gpus, lines):
    each = 3 if isinstance(gpus, str) else len(gpus)
    where = hosts(**dict.fromkeys(topologies, each))
    slots = place(where, topologies, np=each * len(topologies), gpus=gpus, binding="numa")
    assert gpu_remarks(slots, topologies) == lines


def test_gpus_that_get_no_rank_are_named_with_the_reason_unless_the_user_has_hidden_them():
    taken = machine(unusable={1: "busy: pid 7", 2: OUTSIDE, 3: "in MIG mode"})
    assert left_out({"a": taken, "b": machine(unusable={0: "busy: pid 7"})}) == (
        "note: GPU 1 of a, GPU 0 of b: busy: pid 7, not used",
        "note: GPU 3 of a: in MIG mode, not used",
    )


def test_a_model_of_unknown_speed_is_one_note():
    topology = with_facts(name=["Z1"] * 4)
    (line,) = gpu_remarks(place(hosts(a=4), {"a": topology}, np=4, gpus="all", binding="none"), {"a": topology})
    assert line.startswith("note: Z1 (GPU 0 of a, ")
    alone = replace(machine(1), gpus=topology.gpus[:1])
    assert gpu_remarks(place(hosts(a=1), {"a": alone}, np=1, gpus="all", binding="none"), {"a": alone}) == ()


def test_hosts_that_only_nvidia_smi_tells_of_are_named_once():
    told = {host: replace(machine(), source="nvidia-smi") for host in ("a", "b", "c")} | {"d": machine()}
    slots = place(hosts(a=1, b=2, c=0, d=1), told, np=4, gpus="all", binding="numa")
    (line,) = gpu_remarks(slots, told)
    assert line.startswith("note: a, b: NVML is not available")


@pytest.mark.parametrize(
    ("slots", "quota", "group", "where", "remedy"),
    [
        ({"a": 128}, None, 1, None, None),  # eight for each of 16 cores
        ({"a": 129}, None, 1, "a (129 ranks, 16 cores)", "-np 128"),
        (
            {"a": 9, "b": 130, "c": 140},
            None,
            1,
            "b (130 ranks, 16 cores), c (140 ranks, 16 cores)",
            "-np 27 --per-host 9",
        ),
        ({"a": 13}, 1.5, 1, "a (13 ranks, 1.5 cores)", "-np 12"),
        ({"a": 130}, None, 3, "a (130 ranks, 16 cores)", "-np 126"),  # whole replicas
        ({"unknown": 200}, None, 1, None, None),
    ],
)
def test_a_host_with_far_more_ranks_than_cores_is_warned_of_in_one_line(slots, quota, group, where, remedy):
    known = {name: replace(machine(), cpu_quota=quota) for name in "abc"} | {"unknown": machine(0, cores=())}
    placed = place(hosts(**slots), known, np=sum(slots.values()), gpus="none", binding="numa")
    line = f"warning: {where}: more than 8 ranks for each core. Start fewer, for example with {remedy}."
    assert crowded(placed, known, group) == (line if where else None)
