"""Facts from the kernel, without a driver's tool: NUMA nodes, PCIe paths, RDMA adapters, network interfaces."""

import contextlib
import re
from collections.abc import Mapping
from itertools import product, takewhile
from pathlib import Path, PurePosixPath

from launch.cores import parse_cores
from launch.machine.topology import Interface, NumaNode, Port

ROOT, SYSFS = Path("/"), Path("/sys")

# linux/sockios.h and linux/if.h
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_ARPHRD_INFINIBAND = "32"  # linux/if_arp.h
_UNKNOWN_SPEED = (1 << 31) - 1  # or more: a driver's -1, as an unsigned number
_PORTS = range(20_000, 32_768)
_REQUEST_BYTES, _NAME_BYTES = 40, 16


def numa_nodes(sysfs: Path, usable: frozenset[int]) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have cores, with their cores in `usable`; nodes with only memory are left out.

    A kernel without NUMA counts as one node.
    """
    nodes = []
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        cores = read(folder / "cpulist")
        if cores:
            near = tuple(core for core in parse_cores(cores) if core in usable)
            nodes.append(NumaNode(id=int(folder.name.removeprefix("node")), cores=near))
    return tuple(sorted(nodes, key=lambda node: node.id)) or (NumaNode(id=0, cores=tuple(sorted(usable))),)


def cpu_quota(root: Path) -> float | None:
    """Return the CPU time that this process's control groups (v1 or v2) allow, in cores; None without a limit."""
    allowed = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        groups = (PurePosixPath(path), *PurePosixPath(path).parents)  # a container sees its own group as the root
        mounts = {controllers, "cpu" if controllers else ""}  # cpu,cpuacct and a link to it
        for mount, group in product(mounts, groups):
            folder = root / "sys/fs/cgroup" / mount / str(group).lstrip("/")
            files = (folder / f"cpu.{name}" for name in ("max", "cfs_quota_us", "cfs_period_us"))
            numbers = " ".join(map(read, files)).split()  # 150000 100000, in either version; max or -1: no limit
            if len(numbers) == 2 and all(map(str.isdecimal, numbers)) and int(numbers[0]) and int(numbers[1]):
                allowed.append(int(numbers[0]) / int(numbers[1]))
    return min(allowed, default=None)


def in_container(root: Path, environment: Mapping[str, str]) -> bool:
    """Return whether this process runs in a container of Docker, Podman, Kubernetes, Apptainer or Singularity."""
    names = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "KUBERNETES_SERVICE_HOST")
    files = (".dockerenv", "run/.containerenv")
    return any(name in environment for name in names) or any((root / file).exists() for file in files)


def interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces that are up and have an IPv4 address, without loopback."""
    import fcntl
    import socket
    import struct

    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:

        def ask(request: int, name: str) -> bytes:
            padded = name.encode()[: _NAME_BYTES - 1].ljust(_REQUEST_BYTES, b"\0")
            return fcntl.ioctl(asking.fileno(), request, padded)[_NAME_BYTES:]

        for _, name in socket.if_nameindex():
            try:
                (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS, name))
                address, mask = ask(_SIOCGIFADDR, name)[4:8], ask(_SIOCGIFNETMASK, name)[4:8]
            except OSError:
                continue  # no IPv4 address, or already gone
            plain = name.isascii() and name.isprintable()  # Linux allows almost any name
            if plain and flags & _IFF_UP and flags & _IFF_RUNNING and not flags & _IFF_LOOPBACK:
                cidr = f"{socket.inet_ntoa(address)}/{int.from_bytes(mask, 'big').bit_count()}"
                text = read(SYSFS / "class/net" / name / "mtu")
                mtu = int(text) if text.isdecimal() else None
                addresses.append(Interface(name=name, cidr=cidr, speed_mbps=speed_mbps(SYSFS, name), mtu=mtu))
    return tuple(addresses)


def speed_mbps(sysfs: Path, interface: str) -> int | None:
    """Return the Mb/s of a network interface from its driver, else of the active InfiniBand or RoCE ports behind it.

    Return None if neither is known.
    """
    folder = sysfs / "class/net" / interface
    own = read(folder / "speed")
    if own.isdecimal() and 0 < int(own) < _UNKNOWN_SPEED:
        return int(own)
    layer = "InfiniBand" if read(folder / "type") == _ARPHRD_INFINIBAND else "Ethernet"
    rates = [
        _rate_gbps(port)
        for port in (folder / "device/infiniband").glob("*/ports/*")
        if read(port / "link_layer") == layer and read(port / "state").endswith("ACTIVE")
    ]
    return max((round(1000 * rate) for rate in rates if rate), default=None)


def free_port() -> int | None:
    """Return a free TCP port, below the range of ephemeral ports; None if none was found."""
    import random
    import socket

    for port in random.sample(_PORTS, 20):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))
            return port
    return None


def address_toward(address: str) -> str:
    """Return this machine's address on the route to another one's; nothing is sent."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((address, 9))
        return str(trial.getsockname()[0])


def sockets_gbps(cpuinfo: str | None = None) -> float | None:
    """Return the GB/s between the CPU sockets (NCCL's src/graph/topo.h), by /proc/cpuinfo; None for an unknown CPU."""
    text = read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo
    facts = dict(re.findall(r"^(vendor_id|cpu family|model|cpu)\s*:\s*(\S+)", text, re.MULTILINE))
    vendor = facts.get("vendor_id")
    if vendor == "AuthenticAMD":
        return 16.0
    if facts.get("cpu", "").startswith("POWER9"):
        return 32.0
    if vendor != "GenuineIntel" or facts.get("cpu family") != "6" or not facts.get("model", "").isdecimal():
        return None
    steps = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))  # Emerald Rapids, Sapphire Rapids, Skylake; others are older
    return next((gbps for first, gbps in steps if int(facts["model"]) >= first), 6.0)


def pci_device(sysfs: Path, pci: str | None) -> Path | None:
    """Return a PCI device's folder at its place in the tree of bridges; None if the kernel does not show it."""
    link = sysfs / "bus/pci/devices" / (pci or "")
    return link.resolve() if pci and link.exists() else None


def rdma_devices(sysfs: Path) -> tuple[tuple[str, Path], ...]:
    """Return name and PCI folder of each InfiniBand or RoCE adapter, mlx5_2 before mlx5_10; no software adapters."""
    adapters = [(link.name, (link / "device").resolve()) for link in (sysfs / "class/infiniband").glob("*")]
    return tuple(sorted(((name, at) for name, at in adapters if bridges(at)), key=lambda device: natural(device[0])))


def rdma_ports(sysfs: Path, adapter: str) -> tuple[Port, ...]:
    """Return the ports of an InfiniBand or RoCE adapter, by number."""
    folders = (sysfs / "class/infiniband" / adapter / "ports").glob("[0-9]*")
    return tuple(
        Port(
            number=int(folder.name),
            active=read(folder / "state") in ("4: ACTIVE", ""),  # "": not readable
            ethernet=read(folder / "link_layer") == "Ethernet",
            rate_gbps=_rate_gbps(folder),
        )
        for folder in sorted(folders, key=lambda folder: int(folder.name))
    )


def _rate_gbps(port: Path) -> float | None:
    rate = re.match(r"([0-9]+(?:\.[0-9]+)?) Gb/sec", read(port / "rate"))  # 100 Gb/sec (4X EDR)
    return float(rate[1]) if rate else None


def numa_of(device: Path | None) -> tuple[int, ...]:
    """Return the NUMA node of a PCI device; empty if the firmware does not report it."""
    text = read(device / "numa_node") if device else ""
    return (int(text),) if text.isdecimal() else ()


def pcie_kind(a: Path | None, b: Path | None) -> str:
    """Classify the path between two PCI devices, by their folders, like nvidia-smi: PIX, PXB, PHB, NODE or SYS.

    An unknown device counts as far away.
    """
    if a is None or b is None:
        return "SYS"
    bridges_a, bridges_b = bridges(a), bridges(b)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(bridges_a, bridges_b, strict=False)))
    if shared == 0:
        return "NODE" if numa_of(a) and numa_of(a) == numa_of(b) else "SYS"
    if shared == 1:
        return "PHB"
    # Bridges below the last shared one: none between functions of one card, one downstream port each behind one switch.
    deepest = max(len(bridges_a), len(bridges_b)) - shared
    return "PIX" if deepest <= 1 else "PXB"


def bridges(device: Path) -> list[str]:
    """Return the host bridge, then the PCI bridges down to the device, excluding it."""
    roots = (i for i, part in enumerate(device.parts[:-1]) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]{2}", part))
    return list(device.parts[next(roots, len(device.parts)) : -1])


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names with numbers: mlx5_2 before mlx5_10."""
    return [(int(number or 0), word) for word, number in re.findall(r"([^0-9]+)|([0-9]+)", name)]


def read(file: Path) -> str:
    """Read a file of the kernel, stripped; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
