import pytest

from launch.machine.nvidia import NcclSpeeds, speeds_by_name
from launch.machine.system import sockets_gbps

NAMES = {  # GB/s of an NVLink and of PCIe
    (18.0, 12.0): "Tesla P100-SXM2-16GB",
    (20.0, 24.0): "NVIDIA A100-SXM4-40GB",
    (12.0, 24.0): "NVIDIA A10G, NVIDIA RTX A6000",
    (20.6, 48.0): "NVIDIA GH200 480GB, NVIDIA H100 80GB HBM3, NVIDIA H20-3e",
    (40.1, 48.0): "NVIDIA GB200, NVIDIA GB300, NVIDIA RTX PRO 6000 Blackwell Server Edition",
    (None, 12.0): "NVIDIA T1000 8GB, Quadro P620, GeForce GTX 980 Ti, GeForce GTX 1660 SUPER, Tesla P40, Tesla M10",
    (None, 24.0): "NVIDIA L40S, NVIDIA GeForce RTX 4090, NVIDIA RTX6000-Ada-24Q, NVIDIA RTX 6000 Ada Generation",
}


@pytest.mark.parametrize("speeds", NAMES)
def test_knows_a_gpu_by_its_name(speeds):
    names = NAMES[speeds].split(", ")
    assert {name: speeds_by_name(name) for name in names} == dict.fromkeys(
        names, NcclSpeeds(nvlink_gbps=speeds[0], pcie_gbps=speeds[1])
    )


@pytest.mark.parametrize("name", ["", "AMD Instinct MI300X", "A1001", "XV100"])
def test_does_not_guess(name):
    assert speeds_by_name(name) is None


@pytest.mark.parametrize(
    ("cpuinfo", "gbps"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7763\n", 16.0),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\n", 40.0),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon 8480C\n", 22.0),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\n", 10.0),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 79\n", 6.0),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", 32.0),
        ("CPU implementer\t: 0x41\n", None),
    ],
)
def test_knows_the_link_between_sockets_by_the_cpu(cpuinfo, gbps):
    assert sockets_gbps(cpuinfo) == gbps
