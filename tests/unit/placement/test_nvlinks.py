"""NVLinks that are lost on a machine, and machines that are built with unlike pairs."""

import pytest

from launch.machine.nvidia_smi import parse
from launch.placement.gpu_findings import gpu_findings
from launch.probe.host_facts import HostFacts

# A hybrid cube mesh of eight V100.
CUBE = {"NV2": "03 04 12 15 23 47 56 67", "NV1": "01 02 13 26 37 45 46 57"}
B200, H100, A100, A6000, V100 = "NVIDIA B200", "NVIDIA H100 80GB HBM3", "A100-SXM4-40GB", "RTX A6000", "Tesla V100"


def machine(model, size, word, change=None):
    """GPUs that are all connected by `word`, but for some pairs: {word: pairs}."""
    words = {frozenset(map(int, pair)): odd for odd, pairs in (change or {}).items() for pair in pairs.split()}
    places = range(size)
    cells = [["X" if a == b else words.get(frozenset((a, b)), word) for b in places] for a in places]
    rows = ["\t".join([f"GPU{a}", *row]) for a, row in enumerate(cells)]
    return parse("\n".join(["\t".join(["", *(f"GPU{a}" for a in places)]), *rows]), name="t", gpu_name=model)


def problems(topology, gpus="all"):
    facts = {"h1": HostFacts(host="h1", hostname="h1", topology=topology)}
    return [one.problem for one in gpu_findings(facts, {}, (), gpus) if one.about == "NVLink"]


def around(gpu, size=8):
    return " ".join(f"{gpu}{other}" for other in range(size) if other != gpu)


@pytest.mark.parametrize(
    ("model", "size", "word", "change"),
    [
        (B200, 8, "NV18", {}),
        (A100, 4, "NV4", {}),
        (A6000, 4, "SYS", {"NV4": "01 23"}),
        (A6000, 3, "SYS", {"NV4": "01"}),  # its partner may be in another container
        ("NVIDIA H100 NVL", 8, "NODE", {"NV12": "04 15 26 37"}),
        ("NVIDIA H200 NVL", 8, "SYS", {"NV6": "01 02 03 12 13 23 45 46 47 56 57 67"}),
        (V100, 8, "SYS", CUBE),
        (V100, 4, "NV2", {"NV1": "01 02 13"}),  # half of the mesh
        (V100, 3, "NV1", {"NV2": "12"}),
        ("NVIDIA L40S", 8, "SYS", {}),
        ("NVIDIA H100 PCIe", 4, "SYS", {}),
        (B200, 1, "SYS", {}),
    ],
)
def test_machines_as_they_are_built_are_quiet(model, size, word, change):
    assert problems(machine(model, size, word, change)) == []


@pytest.mark.parametrize(
    ("model", "size", "word", "change", "lost"),
    [
        (B200, 8, "NV18", {"SYS": around(2)}, "GPU 2: 0 of 18 NVLinks, 0 of 722 GB/s"),
        (B200, 3, "NV18", {"SYS": "02 12"}, "GPU 2: 0 of 18 NVLinks, 0 of 722 GB/s"),
        (H100, 8, "NV18", {"NV17": around(0)}, "GPU 0: 17 of 18 NVLinks, 350 of 371 GB/s"),
        (A100, 8, "NV12", {"NV6": f"{around(1)} {around(5)}"}, "GPU 1,5: 6 of 12 NVLinks, 120 of 240 GB/s"),
        (H100, 8, "NV18", {"PHB": "23"}, "between GPU 2 and 3: 0 of 18 NVLinks, 0 of 371 GB/s"),
        (H100, 8, "SYS", {}, "GPU 0-7: 0 of 18 NVLinks, 0 of 371 GB/s"),
        (A100, 4, "NV4", {"NV3": "01"}, "between GPU 0 and 1: 3 of 4 NVLinks, 60 of 80 GB/s"),
        (A100, 4, "NV4", {"SYS": around(3, 4)}, "GPU 3: 0 of 8 NVLinks, 0 of 160 GB/s"),
        (A6000, 4, "SYS", {"NV4": "01"}, "GPU 2-3: 0 of 4 NVLinks, 0 of 48 GB/s"),
        (A6000, 4, "SYS", {"NV4": "01", "NV2": "23"}, "between GPU 2 and 3: 2 of 4 NVLinks, 24 of 48 GB/s"),
        (V100, 8, "SYS", {**CUBE, "NV2": CUBE["NV2"][3:]}, "GPU 0,3: 4 of 6 NVLinks, 80 of 120 GB/s"),
        (None, 8, "NV18", {"SYS": around(2)}, "GPU 2: 0 of 18 NVLinks"),
    ],
)
def test_lost_nvlinks_are_counted_with_the_speed_that_they_cost(model, size, word, change, lost):
    assert problems(machine(model, size, word, change)) == [lost]


def test_only_losses_of_gpus_that_a_run_names_count_but_all_are_peers():
    odd = machine(B200, 8, "NV18", {"SYS": around(2)})
    assert problems(odd, (0, 1)) == []
    assert problems(odd, (2, 3)) == ["GPU 2: 0 of 18 NVLinks, 0 of 722 GB/s"]
    assert problems(machine(V100, 8, "SYS", CUBE), (0, 1, 2)) == []
