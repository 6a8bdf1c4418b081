from dataclasses import replace

import pytest

from launch.cores import core_list
from launch.errors import PlacementError
from launch.hosts.host import Host
from launch.machine.nvidia import MIG
from launch.machine.topology import Link, NumaNode
from launch.placement.slots import place, rank_environment, ranks_per_host, split_cores, unfit_ports, with_slots
from tests.unit.machines import RING, hosts, linked, machine, refusal_of, with_ports

ON_CPUS, FOUR_BY_2 = "pass --gpus none", "pass -np 4 --per-host 2"
TWO, FOUR = "--gpus names 2", "host a has 4 free GPUs"
LEAVE, REMEDY = f"leave it out, or {ON_CPUS}", f"start fewer ranks there, or {ON_CPUS}"
SOME = machine(unusable={2: "busy: pid 7"})


def placed(where, topologies, np, *, gpus="all", binding="numa", **more):
    return place(where, topologies, np=np, gpus=gpus, binding=binding, **more)


def test_ranks_fill_the_hosts_in_order_and_follow_the_ring():
    slots = placed(hosts(a=4, b=4, c=4), dict.fromkeys("ab", machine()), 6)
    assert [slot.rank for slot in slots] == [*range(6)]
    assert [f"{slot.host}{slot.local_rank}" for slot in slots] == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert tuple(slot.gpu for slot in slots[:4]) == RING
    assert [slot.gpu for slot in slots[4:]] == [0, 2]  # PIX; 0 and 1 have SYS between them
    assert [slot.gpu_uuid for slot in slots[:2]] == ["GPU-0000", "GPU-2222"]


OWN_CORES = {"numa": "0-7 8-15 0-7 8-15", "cores": "0-3 8-11 4-7 12-15", "none": "   "}


@pytest.mark.parametrize("binding", OWN_CORES)
def test_ranks_share_the_cores_near_their_gpu_or_have_cores_of_their_own_or_none(binding):
    slots = placed(hosts(a=4), {"a": machine()}, 4, binding=binding)
    assert " ".join(core_list(slot.cores) for slot in slots) == OWN_CORES[binding]
    assert [slot.threads for slot in slots] == [4] * 4
    assert [slot.numa for slot in slots] == [(0,), (1,)] * 2


@pytest.mark.parametrize(("quota", "threads"), [(64.0, 4), (11.9, 2), (1.5, 1)])
def test_ranks_share_no_more_cores_than_a_quota_pays_for(quota, threads):
    limited = replace(machine(), cpu_quota=quota)
    assert [slot.threads for slot in placed(hosts(a=4), {"a": limited}, 4)] == [threads] * 4
    unknown = replace(machine(gpus=0), numa_nodes=(), cpu_quota=quota)
    assert placed(hosts(a=4), {"a": unknown}, 4)[0].threads == max(1, int(quota / 4))


@pytest.mark.parametrize("binding", ["numa", "cores"])
def test_a_gpu_of_which_nobody_knows_the_cores_leaves_its_rank_unbound(binding):
    known = machine()
    vague = replace(known, gpus=tuple(replace(gpu, cores=(), numa=()) for gpu in known.gpus))
    for topology, threads in ((vague, 4), (replace(vague, numa_nodes=()), None)):  # of all 16 cores, or of none
        slots = placed(hosts(a=4), {"a": topology}, 4, binding=binding)
        assert [(slot.numa, slot.cores, slot.threads) for slot in slots] == [((), (), threads)] * 4


def test_ranks_are_not_bound_to_fewer_cores_than_ranks():
    few = {"a": machine(cores=(0, 8, 9))}  # two ranks near core 0
    slots = placed(hosts(a=4), few, 4)
    assert [slot.cores for slot in slots] == [(), (8, 9), (), (8, 9)]
    assert [slot.threads for slot in slots] == [1] * 4


def test_a_gpu_without_cores_takes_those_of_its_numa_node():
    known = machine()
    vague = replace(known, gpus=tuple(replace(gpu, cores=()) for gpu in known.gpus))
    assert placed(hosts(a=4), {"a": vague}, 4) == placed(hosts(a=4), {"a": known}, 4)


def test_cores_that_only_overlap_are_nobodys_own():
    known = machine(2)
    cores = tuple(range(4, 10)), tuple(range(6))
    gpus = [replace(gpu, cores=own, numa=()) for gpu, own in zip(known.gpus, cores, strict=True)]
    odd = replace(known, gpus=tuple(gpus))
    assert [slot.cores for slot in placed(hosts(a=2), {"a": odd}, 2)] == list(cores)
    assert [slot.cores for slot in placed(hosts(a=2), {"a": odd}, 2, binding="cores")] == [(), ()]


def test_ranks_on_cpus_spread_over_the_numa_nodes():
    for gpus, topology in (("none", machine()), ("all", machine(0))):
        slots = placed(hosts(a=3), {"a": topology}, 3, gpus=gpus)
        assert [(slot.gpu, slot.gpu_uuid) for slot in slots] == [(None, None)] * 3
        assert [(slot.numa, slot.threads) for slot in slots] == [((0,), 4), ((0,), 4), ((1,), 8)]
    assert placed(hosts(a=1), {"a": machine(0)}, 1)[0].cores == tuple(range(16))


@pytest.mark.parametrize(("first", "ranks", "threads"), [(15, 2, 8), (12, 4, 4), (15, 4, 4), (7, 16, 1)])
def test_ranks_on_cpus_get_equally_many_cores_of_which_a_container_has_unequally_many(first, ranks, threads):
    nodes = (NumaNode(id=0, cores=tuple(range(first))), NumaNode(id=1, cores=tuple(range(32, 48 - first))))
    slots = placed(hosts(a=ranks), {"a": replace(machine(0), numa_nodes=nodes)}, ranks)
    assert [slot.threads for slot in slots] == [threads] * ranks
    assert len({core for slot in slots for core in slot.cores}) == 16


@pytest.mark.parametrize(
    ("second", "how", "gpus"),
    [
        ({"b": 3}, {"gpus": (3, 1, 0, 2)}, (0, 2)),  # of those named the best on every host
        ({"b": 4}, {"ranks_per_replica": 2}, (0, 2)),
    ],
)
def test_named_gpus_and_groups_follow_the_ring_of_each_host(second, how, gpus):
    slots = placed(hosts(a=4, **second), dict.fromkeys("ab", machine()), 6, **how)
    assert [(slot.host, slot.gpu) for slot in slots] == [*(("a", gpu) for gpu in RING), *(("b", gpu) for gpu in gpus)]


@pytest.mark.parametrize(
    ("where", "np", "ranks_per_replica", "message"),
    [
        ({"a": 4}, 3, 2, "--ranks-per-replica 2: -np 3 is not a multiple of it: pass one that is"),
        ({"a": 4, "b": 3}, 6, 2, "--ranks-per-replica 2: the 3 slots of host b are not a multiple of it"),
        ({"a": 2}, 2, 0, "--ranks-per-replica 0: a replica has at least one rank"),
    ],
)
def test_a_group_that_one_host_cannot_hold_is_refused(where, np, ranks_per_replica, message):
    topologies = dict.fromkeys(where, machine())
    with pytest.raises(PlacementError, match=f"^{message}"):
        placed(hosts(**where), topologies, np, ranks_per_replica=ranks_per_replica)


def bare(*names):
    """Hosts that are listed without a number of slots."""
    return tuple(Host(name=name, slots=1, counted=False) for name in names)


KNOWN = {"a": machine(), "b": machine(), "cpu": machine(0), "some": SOME}
KNOWN["taken"] = machine(unusable=dict.fromkeys(range(4), "busy: pid 7"))
CORES = hosts(a=64, some=5, cpu=64)


@pytest.mark.parametrize(
    ("where", "np", "how", "slots"),
    [
        # Hosts without a number have a slot for each GPU.
        ((*hosts(a=2), *bare("b")), None, {}, {"a": 2, "b": 4}),
        (bare("some"), 4, {}, {"some": 4}),  # so that the placement names what is in the way
        (bare("taken", "b"), None, {}, {"b": 4}),
        (bare("a", "b"), 4, {"gpus": (3, 1)}, {"a": 2, "b": 2}),
        (bare("some"), None, {"gpus": (1, 2)}, {"some": 2}),  # named, so it is used though it is busy
        (bare("a", "cpu"), 5, {}, {"a": 4, "cpu": 1}),
        (bare("a", "cpu"), 2, {"gpus": "none"}, {"a": 1, "cpu": 1}),
        (bare("a", "some"), None, {"ranks_per_replica": 2}, {"a": 4, "some": 2}),  # whole replicas
        # More slots than GPUs are cores, and mean a rank for each GPU.
        (CORES, None, {}, {"a": 4, "some": 3, "cpu": 64}),
        (CORES, None, {"gpus": (0, 1)}, {"a": 2, "some": 2, "cpu": 64}),
        (CORES, None, {"gpus": "none"}, {"a": 64, "some": 5, "cpu": 64}),
        (CORES, 99, {}, {"a": 64, "some": 5, "cpu": 64}),  # so that the placement names the host that has too few
        (hosts(some=4), None, {}, {"some": 4}),
        ((Host(name="some", slots=64, unit="rank"),), None, {}, {"some": 64}),  # slots for ranks are kept
    ],
)
def test_how_many_slots_a_host_has(where, np, how, slots):
    found = with_slots(where, KNOWN, np=np, **{"gpus": "all", **how})
    assert {host.name: host.slots for host in found} == slots
    assert {host.name for host in found if not host.counted} <= {host.name for host in where if not host.counted}


def test_on_cpus_the_number_of_ranks_is_to_be_said():
    known = {"a": machine(), "cpu": machine(0), "other": machine(0)}
    listed = refusal_of(
        PlacementError, lambda: with_slots(bare("cpu", "other"), known, np=None, gpus="all", listed=True)
    )
    assert listed.startswith("no GPU found on cpu and 1 more: pass --per-host N, the number of ranks on")
    here = refusal_of(PlacementError, lambda: with_slots(bare("a"), known, np=None, gpus="none", listed=False))
    assert here.startswith("--gpus none on a: pass -np N")
    few = refusal_of(PlacementError, lambda: ranks_per_host(bare("a", "b"), 5))
    assert few == "-np 5 exceeds the 2 available slots (a 1, b 1): write a:3,b:3"


@pytest.mark.parametrize(
    ("where", "topologies", "np", "gpus", "message"),
    [
        ({"a": 4}, {"a": machine()}, 0, "all", "-np 0: a run has at least one rank"),
        ({"a": 2, "b": 1}, {}, 4, "all", "-np 4 exceeds the 3 available slots (a 2, b 1): name more hosts or slots"),
        ({"a": 1, "b": 1}, {"a": machine(0), "b": machine()}, 2, (0,), f"host a has no GPU, but b has: {LEAVE}"),
        ({"a": 1}, {"a": machine(0)}, 1, (0,), f"host a has no GPU, but --gpus asks for some: {LEAVE}"),
        ({"a": 4}, {"a": SOME}, 4, "all", f"host a has 3 free GPUs for 4 ranks (GPU 2: busy: pid 7): {REMEDY}"),
        ({"a": 4}, {"a": machine()}, 4, (3,), "--gpus names 1 for the 4 ranks on host a: name more"),
        ({"a": 8, "b": 8}, {"a": machine()}, 6, (0, 1), f"{TWO} for the 6 ranks on host a: name more, or {FOUR_BY_2}"),
        ({"a": 8, "b": 3}, {"a": machine()}, 6, "all", f"{FOUR} for 6 ranks: pass -np 6 --per-host 3, or {ON_CPUS}"),
        ({"a": 1, "b": 4}, {"a": machine(), "b": machine(2)}, 2, (3,), "host b has no GPU 3, it has 0, 1"),
        (
            *({"a": 2}, {"a": machine(unusable={1: "in MIG mode"})}, 2, (1, 0)),
            f"GPU 1 of host a cannot be used (in MIG mode): choose others with --gpus; MIG: {MIG}",
        ),
        (
            *({"a": 1}, {"a": machine(1, unusable={0: "in MIG mode"})}, 1, "all"),
            f"host a has 0 free GPUs for 1 ranks (GPU 0: in MIG mode): {REMEDY}; MIG: {MIG}",
        ),
    ],
)
def test_refuses_what_does_not_fit_and_names_the_host(where, topologies, np, gpus, message):
    assert refusal_of(PlacementError, lambda: placed(hosts(**where), topologies, np, gpus=gpus)) == message


def test_cores_are_cut_into_parts_of_equal_size_or_one_more():
    assert split_cores((0, 1, 2, 3, 4), 2) == [(0, 1), (2, 3, 4)]
    assert split_cores((0, 1, 8, 9), 2) == [(0, 8), (1, 9)]  # both hardware threads of a core
    assert split_cores((0, 1, 2, 9), 2) == [(0, 9), (1, 2)]
    assert split_cores((0, 1, 2, 8, 9, 10), 2) == [(0, 1, 8), (2, 9, 10)]


@pytest.mark.parametrize(
    ("ports", "unfit"),
    [
        ({"mlx5_0": "down", "mlx5_10": "InfiniBand", "mlx5_1": "InfiniBand"}, ("mlx5_0:1",)),
        ({"mlx5_0": "InfiniBand", "mlx5_4": "InfiniBand Ethernet", "NIC5": "down-Ethernet"}, ("mlx5_4:2", "NIC5:1")),
        ({"mlx5_0": "Ethernet", "mlx5_1": "Ethernet"}, ()),  # RoCE
        ({"mlx5_0": "", "NIC1": ""}, ()),  # as in a saved text
    ],
)
def test_nccl_leaves_ports_alone_that_are_down_or_ethernet_beside_infiniband(ports, unfit):
    assert unfit_ports(with_ports(machine(), **ports)) == unfit


def test_a_slot_holds_all_that_its_rank_needs():
    known = {"a": with_ports(machine(), mlx5_0="down", mlx5_1="InfiniBand Ethernet"), "b": machine()}
    own = {"OMP_NUM_THREADS": "8"}
    unfit = ("mlx5_0:1", "mlx5_1:2")

    def slot(where, gpus="all"):
        np = sum(host.slots for host in where)
        interfaces = {"a": "eth0", "b": "ens5"} if len(where) > 1 else {}
        return place(where, known, np=np, gpus=gpus, binding="numa", interfaces=interfaces)[1]

    several = slot(hosts(a=2, b=1))
    assert (several.interface, several.unfit_ports) == ("eth0", unfit)
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    assert several.environment == {**own, **dict.fromkeys(names, "eth0"), "NCCL_IB_HCA": "^=mlx5_0:1,mlx5_1:2"}
    assert slot(hosts(a=1, b=1)).environment == {**own, **dict.fromkeys(names, "ens5")}
    for without in (slot(hosts(a=2)), slot(hosts(a=2, b=1), gpus="none")):  # one host; ranks on CPUs
        assert without.unfit_ports == ()
        assert "NCCL_IB_HCA" not in without.environment
    assert slot(hosts(a=2)).environment == own


def test_what_the_user_has_set_stays():
    set_by_user = ("OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "HOROVOD_GLOO_IFACE")
    assert rank_environment(8, "eth0", ("mlx5_0:1",), set_by_user) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_too_many_gpus_to_compare_are_refused_with_their_host():
    many = linked(17, odd={(a, b): Link(kind="PIX") for a in range(17) for b in range(a) if a * b % 2})
    with pytest.raises(PlacementError, match=r"^host b: .*17 .*GPUs are "):
        placed(hosts(b=17), {"b": many}, 17)
