import re

import pytest

from launch.errors import TopologyError
from launch.machine.rocm_smi import parse
from launch.machine.topology import Link

TEXT = """

============================ ROCm System Management Interface ============================
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           40
GPU1   15           0            72
GPU2   40           72           0

================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU2
GPU0   0            1            2
GPU1   1            0            3
GPU2   2            3            0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU 1          : (Topology) Numa Node: 1
GPU[2]\t\t: (Topology) Numa Node: 7
GPU[2]\t\t: (Topology) Numa Affinity: 0
================================== End of ROCm SMI Log ===================================
"""


def test_reads_both_spellings():
    topology = parse(TEXT, name="rocm-smi")
    assert topology.source == "rocm-smi"
    assert [gpu.numa for gpu in topology.gpus] == [(0,), (1,), (0,)]  # the affinity, where there is one
    assert topology.links[0] == (Link(kind="X"), Link(kind="XGMI", count=1), Link(kind="NODE"))
    assert topology.links[1][2] == topology.links[2][1] == Link(kind="SYS")


def test_pcie_between_gpus_of_unknown_nodes_is_taken_to_be_far():
    topology = parse(TEXT.replace("Numa Node: 0", "Numa Node: -1").replace("Affinity: 0", "Affinity: -1"), name="t")
    assert [gpu.numa for gpu in topology.gpus] == [(), (1,), (7,)]
    assert topology.links[0][2] == Link(kind="SYS")


def test_the_link_types_alone_will_do():
    only = TEXT[TEXT.index("=== Link") : TEXT.index("=== Numa")].replace("GPU2", "GPU12")
    topology = parse(f"{only[only.index('=') :]}", name="t")
    assert [gpu.index for gpu in topology.gpus] == [0, 1, 12]
    assert [gpu.numa for gpu in topology.gpus] == [(), (), ()]


def test_gpus_come_by_number_whatever_the_order_of_columns():
    swapped = TEXT.translate(str.maketrans({"0": "0"})).replace("GPU0", "GPU9").replace("GPU[0]", "GPU[9]")
    topology = parse(swapped, name="t")
    assert [gpu.index for gpu in topology.gpus] == [1, 2, 9]
    assert topology.links[0] == (Link(kind="X"), Link(kind="SYS"), Link(kind="XGMI", count=1))
    assert topology.gpus[2].numa == (0,)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GPU1   XGMI         0            PCIE", "GPU1   PCIE         0            PCIE", "t:18: GPU1-GPU0 says PCIE"),
        ("GPU1   XGMI         0            PCIE\n", "", "t:18: no row of GPU1"),
        ("GPU1   XGMI         0            PCIE", "GPU1   XGMI         0", "t:21: GPU1 has 2 cells; expected 3"),
        ("GPU1   XGMI ", "GPU0   XGMI ", "t:21: row 'GPU0'"),
        ("GPU1   XGMI ", "GPU7   XGMI ", "t:21: row 'GPU7'"),
        ("XGMI         0            PCIE", "CXL         0            PCIE", "t:21: GPU1-GPU0 says 'CXL'"),
        ("XGMI         0            PCIE", "XGMI         XGMI         PCIE", "t:21: GPU1-GPU1 says 'XGMI'"),
        ("15           0            72", "15           0            73", "t:6: GPU2-GPU1 says 72, GPU1-GPU2 says 73"),
        ("2            3            0", "2            x            0", "t:16: GPU2-GPU1 says 'x'"),
        ("Hops between", "Hope between", "t:12: section 'Hope between two GPUs'"),
        ("Hops between", "Weight between", "t:12: section 'Weight between two GPUs'"),
        ("Link Type", "Weight", "t:18: section"),
        ("Numa Affinity: 0\nGPU 1", "Numa Affinity: zero\nGPU 1", "t:26: found"),
        ("Numa Node: 1\n", "Numa Node: 1\nGPU 1 : (Topology) Numa Node: 1\n", "t:28: found"),
        ("GPU 1          :", "GPU 5          :", "t: section 'Numa Nodes' has GPU 5"),
        ("WARNING:", "Segmentation fault", "t:4: found 'Segmentation fault"),
        (
            "       GPU0         GPU1         GPU2\nGPU0   0            XGMI",
            "GPU0   0            XGMI",
            "t:19: column '0'",
        ),
        ("       GPU0         GPU1         GPU2\nGPU0   0            15", "GPU0 GPU1 GPU1\nGPU0 0 15", "column 'GPU1'"),
    ],
)
def test_refuses_what_it_does_not_understand(old, new, message):
    assert old in TEXT
    with pytest.raises(TopologyError, match=re.escape(message)) as caught:
        parse(TEXT.replace(old, new, 1), name="t")
    assert "expected" in str(caught.value) or "no table has" in str(caught.value)


def test_says_what_is_missing():
    with pytest.raises(TopologyError, match="no section 'Link Type between two GPUs'"):
        parse(TEXT[: TEXT.index("=============================== Link")], name="t")
