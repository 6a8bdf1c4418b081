import pytest

from launch.machine.nvidia import Speeds, is_wired, most_nvlinks, speeds_by_name, uuid_digits
from launch.machine.system import sockets_gbps
from launch.machine.topology import link_between

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
        names, Speeds(nvlink_gbps=speeds[0], pcie_gbps=speeds[1])
    )


@pytest.mark.parametrize("name", ["", "AMD Instinct MI300X", "A1001", "XV100"])
def test_does_not_guess(name):
    assert speeds_by_name(name) is None


def test_the_digits_of_uuids_are_enough_unless_one_is_of_another_kind():
    uuid = "GPU-0a1b2c3d-0000-1111-2222-0123456789ab"
    assert uuid_digits([uuid, uuid]) == 2 * "0a1b2c3d0000111122220123456789ab"
    assert uuid_digits([uuid, None]) is uuid_digits([uuid, "MIG-1"]) is None


def test_what_is_known_of_a_board_by_its_name():
    assert [most_nvlinks(name) for name in ("Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3", None)] == [6, 18, 18]
    assert [is_wired(name) for name in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 PCIe")] == [True, False, False]


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


V100, A100, UNKNOWN = Speeds(nvlink_gbps=20.0, pcie_gbps=12.0), Speeds(nvlink_gbps=20.0, pcie_gbps=24.0), Speeds()


@pytest.mark.parametrize(
    ("kind", "count", "ends", "sockets", "gbps"),
    [
        ("NV", 2, (V100, V100), None, 40.0),
        ("NV", 18, (Speeds(nvlink_gbps=20.6), Speeds(nvlink_gbps=20.6)), None, 370.8),
        ("NV", 2, (V100, UNKNOWN), None, None),
        ("PIX", 0, (V100, A100), 10.0, 12.0),
        ("SYS", 0, (V100, A100), 16.0, 12.0),
        ("SYS", 0, (A100, A100), None, None),
        ("SYS", 0, (A100, UNKNOWN), 16.0, None),
    ],
)
def test_a_link_is_as_fast_as_its_slowest_part(kind, count, ends, sockets, gbps):
    assert link_between(kind, count, ends, sockets).gbps == gbps
