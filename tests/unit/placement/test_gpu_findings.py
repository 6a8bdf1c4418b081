"""Each fault of GPUs, links and adapters that `hvdlaunch check` looks for, planted on one of two hosts."""

from dataclasses import replace

import pytest

from launch.hosts.host_facts import HostFacts
from launch.machine.nvidia_smi import parse
from launch.machine.topology import Link
from launch.placement.gpu_findings import gpu_findings, links, training_findings
from tests.unit.machines import SOFTWARE, condition, facts_of, linked, machine, with_ports

EIGHT_LANES = "8 of 16 PCIe lanes"
ROW = "a row of its memory waits to be remapped"
ILL = "unhealthy: 5 uncorrected memory errors since its driver was loaded"


def of(topologies, given=(), **slots):
    facts = {host: HostFacts(host=host, hostname=host, topology=own) for host, own in topologies.items()}
    return facts_of(gpu_findings(facts, slots, given))


def wired(kind, **link):
    """Four GPUs that are all connected alike, or but for odd pairs."""
    return replace(machine(), links=linked(4, kind, **link).links)


def with_nvlink(*pairs):
    """Some GPUs with slow PCIe, and pairs of them with NVLink."""
    return wired("SYS", gbps=10.0, odd=dict.fromkeys(pairs, Link(kind="NV", count=2, gbps=40.0)))


def with_gpu(index, **changes):
    whole = machine()
    return replace(whole, gpus=tuple(replace(gpu, **changes) if gpu.index == index else gpu for gpu in whole.gpus))


@pytest.mark.parametrize(
    ("odd", "slots", "problem"),
    [
        (machine(0), 4, "error: h2: no GPU, but on h1: look at `nvidia-smi` there, or leave the host out"),
        (machine(2), 4, "error: h2: 2 of 2 GPUs are free for 4 ranks: list it as h2:2, or free the others"),
        (with_gpu(1, drawbacks=(EIGHT_LANES,)), 4, f"warning: h2: GPU 1: {EIGHT_LANES}: look at `nvidia-smi -q -d"),
        (
            with_gpu(0, drawbacks=("slowed down by heat",)),
            4,
            "warning: h2: GPU 0: slowed down by heat: look at `nvidia",
        ),
        (with_gpu(2, drawbacks=(ROW,)), 4, f"warning: h2: GPU 2: {ROW}: `nvidia-smi -r -i 2` there as root"),
        (with_gpu(1, unusable=ILL), 3, f"error: h2: GPU 1: {ILL}: `nvidia"),
        (with_gpu(1, unusable="busy: pid 7"), 3, "warning: h2: GPU 1: busy: pid 7: wait for it, or end it"),
        (with_gpu(1, unusable="in MIG mode"), 3, "warning: h2: GPU 1: in MIG mode, not used: one process runs on a"),
        (with_gpu(1, unusable="outside your CUDA_VISIBLE_DEVICES"), 3, None),
    ],
)
def test_gpus_that_are_missing_busy_ill_or_slowed(odd, slots, problem):
    assert of({"h1": machine(), "h2": machine()}, h1=4, h2=4) == []
    lines = of({"h1": machine(), "h2": odd}, h1=4, h2=slots)
    assert [line[: len(problem or "")] for line in lines] == ([problem] if problem else [])


def test_without_any_gpu_the_ranks_would_run_on_cpus():
    lines = of({"h1": machine(0), "h2": machine(0)}, h1=2, h2=2)
    starts = [f"warning: {host}: no GPU, ranks would run on CPU" for host in ("h1", "h2")]
    assert [line.rpartition(": ")[0] for line in lines] == starts


def test_unlike_models_are_told_on_one_host_and_between_hosts():
    (line,) = of({"h1": with_gpu(3, name="L4"), "h2": with_gpu(3, name="L4"), "h3": machine()})[2:]
    assert line.startswith("warning: h3: the GPUs are unknown, on h1, h2 L4 and unknown: take GPUs of one model")
    (line,) = of({"h1": with_gpu(3, name="L4")})
    assert line.startswith("warning: h1: unlike GPUs, L4 and unknown: ")


@pytest.mark.parametrize(
    ("topology", "words", "problem"),
    [
        (wired("NV", count=12, gbps=240.0), "NVLink", None),
        (with_nvlink((0, 1), (2, 3)), "NVLink, some pairs", None),
        (machine(), "PCIe", None),
        (wired("PIX", gbps=24.0), "PCIe, 24 GB/s", None),
        (wired("SYS", gbps=10.0), "PCIe, 10 GB/s", None),
        (wired("PHB", gbps=48.0, p2p=False), "PCIe, 48 GB/s, not straight", "GPU 0 and 1 and 5 more pairs cannot copy"),
    ],
)
def test_links_are_nvlink_fast_pcie_or_a_finding_with_a_remedy(topology, words, problem):
    assert links(topology) == words
    lines = of({"h1": topology})
    assert len(lines) == (problem is not None)
    assert all(line.startswith(f"warning: h1: {problem}") for line in lines)


def rated(topology, gbps):
    ports = ((nic, tuple(replace(port, rate_gbps=gbps) for port in nic.ports)) for nic in topology.nics)
    return replace(topology, nics=tuple(replace(nic, ports=own) for nic, own in ports))


SOUND = rated(with_ports(machine(), mlx5_0="InfiniBand"), 200.0)


@pytest.mark.parametrize(
    ("odd", "problems"),
    [
        (SOUND, []),
        (
            rated(with_ports(machine(), mlx5_0="InfiniBand down"), 100.0),
            ["warning: h3: port 2 of mlx5_0 is down: ", "warning: h3: ports that are up: 1 x 100 Gb/s, on h1, h2 1 x"],
        ),
        (
            with_ports(machine(), mlx5_0="down"),
            ["warning: h3: port 1 of mlx5_0 is down: ", "error: h3: no InfiniBand or RoCE port is up, but on h1, h2: "],
        ),
        (machine(), ["error: h3: no InfiniBand or RoCE port is up, but on h1, h2: fix its adapter, or `export NCCL_"]),
    ],
)
def test_ports_of_adapters(odd, problems):
    lines = of({"h1": SOUND, "h2": SOUND, "h3": odd})
    assert [line[: len(start)] for line, start in zip(lines, problems, strict=True)] == problems
    assert of({"h1": SOUND, "h2": SOUND, "h3": odd}, given=["NCCL_IB_DISABLE"]) == []


def test_what_a_training_lacks():
    plain = HostFacts(host="h1", hostname="h1", topology=machine())

    def lacks(**changes):
        own = replace(plain, condition=condition(software=replace(SOFTWARE, **changes)))
        return facts_of(training_findings({"h1": own}))

    assert lacks() == []
    (line,) = lacks(horovod_has_nccl=False)
    assert line.startswith("error: h1: Horovod was built without NCCL: no two GPUs can train: run `GPU=1 make setup`")
    torch, horovod = lacks(torch=None, horovod=None, horovod_has_nccl=None)
    assert torch.startswith("error: h1: torch is not installed: run `make setup`")
    assert horovod.startswith("error: h1: Horovod is not installed: run")
    assert training_findings({"h1": plain}) == []
    assert lacks(torch=None, horovod=None, project=None) == []  # hvdlaunch alone starts other programs


# NVLinks that are lost on a machine, and machines that are built with unlike pairs.

# A hybrid cube mesh of eight V100.
CUBE = {"NV2": "03 04 12 15 23 47 56 67", "NV1": "01 02 13 26 37 45 46 57"}
B200, H100, A100, A6000, V100 = "NVIDIA B200", "NVIDIA H100 80GB HBM3", "A100-SXM4-40GB", "RTX A6000", "Tesla V100"


def wired_as(model, size, word, change=None):
    """GPUs that are all connected by `word`, but for some pairs: {word: pairs}."""
    words = {frozenset(map(int, pair)): odd for odd, pairs in (change or {}).items() for pair in pairs.split()}
    places = range(size)
    cells = [["X" if a == b else words.get(frozenset((a, b)), word) for b in places] for a in places]
    rows = ["\t".join([f"GPU{a}", *row]) for a, row in enumerate(cells)]
    return parse("\n".join(["\t".join(["", *(f"GPU{a}" for a in places)]), *rows]), name="t", gpu_name=model)


def lost_nvlinks(topology, gpus="all"):
    facts = {"h1": HostFacts(host="h1", hostname="h1", topology=topology)}
    return [one.problem for one in gpu_findings(facts, {}, (), gpus) if one.about == "NVLink"]


def around(gpu, size=8):
    return " ".join(f"{gpu}{other}" for other in range(size) if other != gpu)


@pytest.mark.parametrize(
    ("model", "size", "word", "change"),
    [
        (A100, 4, "NV4", {}),
        (A6000, 4, "SYS", {"NV4": "01 23"}),
        (A6000, 3, "SYS", {"NV4": "01"}),  # its partner may be in another container
        ("NVIDIA H100 NVL", 8, "NODE", {"NV12": "04 15 26 37"}),
        ("NVIDIA H200 NVL", 8, "SYS", {"NV6": "01 02 03 12 13 23 45 46 47 56 57 67"}),
        (V100, 8, "SYS", CUBE),
        ("NVIDIA L40S", 8, "SYS", {}),
    ],
)
def test_machines_as_they_are_built_are_quiet(model, size, word, change):
    assert lost_nvlinks(wired_as(model, size, word, change)) == []


@pytest.mark.parametrize(
    ("model", "size", "word", "change", "lost"),
    [
        (B200, 8, "NV18", {"SYS": around(2)}, "GPU 2: 0 of 18 NVLinks, 0 of 722 GB/s"),
        (H100, 8, "NV18", {"NV17": around(0)}, "GPU 0: 17 of 18 NVLinks, 350 of 371 GB/s"),
        (A100, 8, "NV12", {"NV6": f"{around(1)} {around(5)}"}, "GPU 1,5: 6 of 12 NVLinks, 120 of 240 GB/s"),
        (H100, 8, "NV18", {"PHB": "23"}, "between GPU 2 and 3: 0 of 18 NVLinks, 0 of 371 GB/s"),
        (A100, 4, "NV4", {"NV3": "01"}, "between GPU 0 and 1: 3 of 4 NVLinks, 60 of 80 GB/s"),
        (A6000, 4, "SYS", {"NV4": "01"}, "GPU 2-3: 0 of 4 NVLinks, 0 of 48 GB/s"),
        (A6000, 4, "SYS", {"NV4": "01", "NV2": "23"}, "between GPU 2 and 3: 2 of 4 NVLinks, 24 of 48 GB/s"),
        (V100, 8, "SYS", {**CUBE, "NV2": CUBE["NV2"][3:]}, "GPU 0,3: 4 of 6 NVLinks, 80 of 120 GB/s"),
        (None, 8, "NV18", {"SYS": around(2)}, "GPU 2: 0 of 18 NVLinks"),
    ],
)
def test_lost_nvlinks_are_counted_with_the_speed_that_they_cost(model, size, word, change, lost):
    assert lost_nvlinks(wired_as(model, size, word, change)) == [lost]


def test_only_losses_of_gpus_that_a_run_names_count_but_all_are_peers():
    odd = wired_as(B200, 8, "NV18", {"SYS": around(2)})
    assert lost_nvlinks(odd, (0, 1)) == []
    assert lost_nvlinks(odd, (2, 3)) == ["GPU 2: 0 of 18 NVLinks, 0 of 722 GB/s"]
    assert lost_nvlinks(wired_as(V100, 8, "SYS", CUBE), (0, 1, 2)) == []
