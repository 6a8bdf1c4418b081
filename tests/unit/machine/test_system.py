import fcntl
import os
import random
import socket
import struct

import pytest

from launch.machine import system
from launch.machine.system import cpu_quota, free_port, numa_nodes, numa_of, pci_device, pcie_kind, rdma_devices
from launch.machine.topology import Interface, NumaNode, Port
from tests.unit.machine.sysfs import write_adapter, write_device

# Two sockets; on the first a switch with two GPUs and a NIC, a second switch below it, and a root port of its own.
SWITCH = "pci0000:10/0000:10:01.0/0000:11:00.0"
DEVICES = {
    "0000:13:00.0": (f"{SWITCH}/0000:12:00.0", 0),
    "0000:14:00.0": (f"{SWITCH}/0000:12:01.0", 0),
    "0000:15:00.0": (f"{SWITCH}/0000:12:02.0", 0),
    "0000:15:00.1": (f"{SWITCH}/0000:12:02.0", 0),
    "0000:19:00.0": (f"{SWITCH}/0000:12:03.0/0000:16:00.0/0000:17:01.0", 0),
    "0000:20:00.0": ("pci0000:10/0000:10:02.0", 0),
    "0000:31:00.0": ("pci0000:30/0000:30:01.0", 0),
    "0000:41:00.0": ("pci0000:40/0000:40:01.0", 1),
    "0000:51:00.0": ("pci0000:50/0000:50:01.0", -1),
}


@pytest.fixture
def sysfs(tmp_path):
    for address, (bridges, node) in DEVICES.items():
        write_device(tmp_path, bridges, address, node)
    return tmp_path


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def port(state="4: ACTIVE", rate="100 Gb/sec (4X EDR)", link_layer="InfiniBand"):
    return {"state": state, "rate": rate, "link_layer": link_layer}


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("0000:13:00.0", "0000:14:00.0", "PIX"),
        ("0000:15:00.0", "0000:15:00.1", "PIX"),  # two functions of one card
        ("0000:13:00.0", "0000:19:00.0", "PXB"),
        ("0000:13:00.0", "0000:20:00.0", "PHB"),
        ("0000:13:00.0", "0000:31:00.0", "NODE"),
        ("0000:13:00.0", "0000:41:00.0", "SYS"),
    ],
)
def test_classifies_a_way_as_nvidia_smi_does(sysfs, a, b, kind):
    folders = [pci_device(sysfs, pci) for pci in (a, b)]
    assert pcie_kind(*folders) == pcie_kind(*reversed(folders)) == kind


def test_knows_the_numa_node_of_a_device(sysfs):
    devices = ("0000:13:00.0", "0000:41:00.0", "0000:51:00.0", "0000:ff:00.0")
    assert [numa_of(pci_device(sysfs, pci)) for pci in devices] == [(0,), (1,), (), ()]


def test_lists_adapters_of_hardware_by_number(sysfs):
    assert rdma_devices(sysfs) == ()
    for name in ("mlx5_10", "mlx5_2", "hfi1_0"):
        write_adapter(sysfs, name, sysfs / "bus/pci/devices/0000:15:00.0")
    (sysfs / "class/infiniband/rxe0").mkdir()
    assert [name for name, _ in rdma_devices(sysfs)] == ["hfi1_0", "mlx5_2", "mlx5_10"]
    assert {folder for _, folder in rdma_devices(sysfs)} == {pci_device(sysfs, "0000:15:00.0")}


def test_lists_the_ports_of_an_adapter_by_number(sysfs):
    facts = {10: ("4: ACTIVE", "Ethernet"), 2: ("1: DOWN", "InfiniBand"), 3: ("5: ACTIVE_DEFER", "InfiniBand")}
    for number, (state, layer) in facts.items():
        for name, text in port(state, f"{20 * number} Gb/sec (4X HDR)", layer).items():
            write(sysfs / f"class/infiniband/mlx5_0/ports/{number}/{name}", f"{text}\n")
    (sysfs / "class/infiniband/mlx5_0/ports/11").mkdir()  # nothing of it may be read
    assert system.rdma_ports(sysfs, "mlx5_0") == (
        Port(number=2, active=False, ethernet=False, rate_gbps=40.0),
        Port(number=3, active=False, ethernet=False, rate_gbps=60.0),
        Port(number=10, active=True, ethernet=True, rate_gbps=200.0),
        Port(number=11, active=True, ethernet=False),
    )
    assert system.rdma_ports(sysfs, "mlx5_1") == ()


def test_lists_numa_nodes_with_the_cores_that_may_be_used(tmp_path):
    for node, cores in ((0, "0-3\n"), (1, "4-7\n"), (10, "8-9\n"), (2, "\n")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cores)
    nodes = tuple(NumaNode(id=node, cores=cores) for node, cores in ((0, (1, 2)), (1, ()), (10, (8, 9))))
    assert numa_nodes(tmp_path, frozenset({1, 2, 8, 9, 99})) == nodes
    assert numa_nodes(tmp_path / "none", frozenset({0, 3})) == (NumaNode(id=0, cores=(0, 3)),)


def test_lists_the_interfaces_that_are_up_with_their_network(monkeypatch, tmp_path):
    flags = {"lo": 0x49, "eth0": 0x1043, "down0": 0x1002, "unplugged0": 0x1003, "no_address0": 0x1043}
    flags["\x1b[2J"] = 0x1043  # Linux takes such a name
    addresses = dict.fromkeys(flags, "10.0.0.1") | {"lo": "127.0.0.1", "eth0": "10.1.2.3"}
    del addresses["no_address0"]

    def ioctl(fd, request, padded):
        name = padded[:16].rstrip(b"\0").decode()
        if request == 0x8913:
            return padded[:16] + struct.pack("H", flags[name]) + bytes(22)
        if name not in addresses:
            raise OSError(99, os.strerror(99))
        dotted = addresses[name] if request == 0x8915 else "255.255.240.0"
        return padded[:16] + struct.pack("HH", 2, 0) + socket.inet_aton(dotted) + bytes(16)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(flags)))
    monkeypatch.setattr(system, "SYSFS", tmp_path)
    write(tmp_path / "class/net/eth0/speed", "25000\n")
    write(tmp_path / "class/net/eth0/mtu", "9000\n")
    assert system.interfaces() == (Interface(name="eth0", cidr="10.1.2.3/20", speed_mbps=25_000, mtu=9000),)


@pytest.mark.parametrize(
    ("speed", "kind", "ports", "mbps"),
    [
        ("25000", "1", [], 25_000),
        ("-1", "1", [], None),
        (None, "32", [port()], 100_000),
        ("-1", "32", [port(rate="2.5 Gb/sec (1X SDR)")], 2_500),
        (None, "32", [port(state="1: DOWN")], None),
        (None, "32", [port(), port(link_layer="Ethernet", rate="400 Gb/sec (4X NDR)")], 100_000),  # of two kinds
        (None, "1", [port(), port(link_layer="Ethernet", rate="40 Gb/sec (4X QDR)")], 40_000),
    ],
)
def test_the_speed_of_an_interface_is_its_own_or_its_ports(tmp_path, speed, kind, ports, mbps):
    folder = tmp_path / "class/net/x0"
    write(folder / "type", f"{kind}\n")
    if speed is not None:
        write(folder / "speed", f"{speed}\n")
    for number, files in enumerate(ports, 1):
        for name, text in files.items():
            write(folder / f"device/infiniband/mlx5_0/ports/{number}/{name}", f"{text}\n")
    assert system.speed_mbps(tmp_path, "x0") == mbps
    assert system.speed_mbps(tmp_path, "y0") is None


def test_a_free_port_is_one_on_which_nobody_listens(monkeypatch):
    free = free_port()
    with socket.socket() as listener:
        listener.bind(("", free))
        listener.listen()
        monkeypatch.setattr(random, "sample", lambda *_: [free])
        assert free_port() is None


V1 = "7:pids:/\n4:cpu,cpuacct:/docker/3bf3\n2:cpuset:/docker/3bf3\n"


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),  # as a container sees itself
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        (
            "0::/a/b/c\n",
            {"a/cpu.max": "400000 100000", "a/b/cpu.max": "250000 100000", "a/b/c/cpu.max": "max 100000"},
            2.5,
        ),
        (V1, {"cpu/docker/3bf3/cpu.cfs_quota_us": "50000", "cpu/docker/3bf3/cpu.cfs_period_us": "100000"}, 0.5),
        (
            V1,
            {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            1.5,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "200000"}, None),
        (V1, {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
    ],
)
def test_the_quota_is_that_of_the_strictest_group(tmp_path, line, files, quota):
    write(tmp_path / "proc/self/cgroup", line)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, f"{text}\n")
    assert cpu_quota(tmp_path) == quota
    assert cpu_quota(tmp_path / "none") is None  # no control groups
