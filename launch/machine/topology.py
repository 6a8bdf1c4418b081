"""GPUs, links, NUMA nodes, NICs and disks of one host."""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface
from itertools import combinations, pairwise

from launch.cores import MAX_CORES, core_list
from launch.errors import ProcessError, TopologyError
from launch.machine.decode import decode, short

PCIE_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first
NVLINKS = {"P100": 4, "V100": 6, "A100": 12, "A800": 8, "H800": 8}  # of one GPU, by a part of its name
MAX_NVLINKS = 18  # of any other GPU, up to Blackwell
# Models whose boards connect all GPUs by NVLink; the same chips on PCIe cards have other names.
WIRED = re.compile(r"SXM[3-9]|HBM3|\bG?B[23]00\b|\bH20\b|\bH200\b(?! NVL)")
# MiB that a GPU without a run may use: a driver counts 256 of its firmware as used (NVIDIA/open-gpu-kernel-modules
# issue 357), and a training rank uses more than this.
IDLE_MIB = 1024
IN_MIG_MODE = "in MIG mode"
ANOTHER_RUN = "another run of yours"  # which holds a GPU by a lock that the driver does not know
OUTSIDE = "outside your CUDA_VISIBLE_DEVICES"
# NCCL: "Duplicate GPU detected", since 2.5 (NVIDIA/nccl issues 418 and 1716).
MIG = (
    "one process runs on a slice, started without hvdlaunch, with the UUID of the slice (nvidia-smi -L) in "
    "CUDA_VISIBLE_DEVICES; several ranks on slices of one GPU do not, NCCL refuses them"
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two devices of one host are connected."""

    kind: str  # X (itself), NV, PIX, PXB, PHB, NODE or SYS
    count: int = 0  # bonded NVLinks; 0 on PCIe and between sockets
    gbps: float | None = None  # GB/s one way; None if the generation is unknown
    p2p: bool = True  # False: the driver does not allow direct copies


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU."""

    index: int  # in PCI order, like nvidia-smi
    cores: tuple[int, ...] = ()  # near it; empty if unknown
    numa: tuple[int, ...] = ()  # NUMA nodes near it; empty if unknown
    uuid: str | None = None
    name: str | None = None
    pci: str | None = None  # domain:bus:device.function, lower case, for example 0000:3b:00.0
    unusable: str | None = None  # why no run may use it: busy, in MIG mode, lost; None if it is free
    shared: str | None = None  # why it was busy, if --gpus names it nevertheless
    drawbacks: tuple[str, ...] = ()  # what may slow it: a display, a slow PCIe link


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an InfiniBand or RoCE adapter."""

    number: int  # from 1
    active: bool  # its link is up
    ethernet: bool  # else InfiniBand
    rate_gbps: float | None = None  # Gb/s; None if unknown


@dataclass(frozen=True, kw_only=True)
class Nic:
    """One InfiniBand or RoCE adapter."""

    name: str  # in the form of NCCL_IB_HCA: mlx5_0
    links: tuple[Link, ...]  # to each GPU, in the order of Topology.gpus
    ports: tuple[Port, ...] = ()  # empty if unknown


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One NVMe disk on PCIe."""

    name: str  # in /dev: nvme0n1
    pci: str  # of its controller
    numa: tuple[int, ...]  # NUMA node near it; empty if unknown
    links: tuple[Link, ...]  # to each GPU, in the order of Topology.gpus


@dataclass(frozen=True, kw_only=True)
class PcieNode:
    """A place in the PCIe tree: a root complex, a switch, or a GPU, an adapter or a disk behind them."""

    depth: int  # 0: a root complex
    address: str  # pci0000:15 of a root complex, else like Gpu.pci; for a switch its upstream port
    device: str | None  # GPU0, mlx5_0, nvme0n1; None: a root complex or a switch
    numa: tuple[int, ...]  # NUMA node near it; empty if unknown
    generation: int | None  # of PCIe, of the upstream link; None if unknown
    lanes: int | None  # of this link; None if unknown


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface with an IPv4 address."""

    name: str  # in the form of NCCL_SOCKET_IFNAME: eth0
    cidr: str  # address and length of its network: 10.0.0.3/24
    speed_mbps: int | None = None  # Mb/s; None if the kernel does not know it, like most virtual ones
    mtu: int | None = None  # bytes of the largest packet; None if unknown


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node."""

    id: int
    cores: tuple[int, ...]  # cores that this process may use


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The hardware of one host, and its connections."""

    source: str  # NVML, nvidia-smi, a file's name, or none
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()  # [gpu][gpu], both by position in gpus
    nics: tuple[Nic, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()  # empty if unknown
    interfaces: tuple[Interface, ...] = ()  # without loopback; empty if unknown
    cpu_quota: float | None = None  # CPU time of all its processes together, in cores; None without a limit
    disks: tuple[Disk, ...] = ()
    pcie: tuple[PcieNode, ...] = ()  # each before those behind it; empty if unknown
    measured: bool = False  # the GB/s of the links were measured, and replace the table of link speeds

    @property
    def devices(self) -> tuple[Nic | Disk, ...]:
        """The devices with a link to each GPU: NICs, then disks."""
        return (*self.nics, *self.disks)


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """P2P support between GPUs, from `nvidia-smi topo -p2p`, which does not show how they are connected."""

    source: str
    gpus: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]  # [from][to], by position in gpus: X (itself) or one of P2P_WORDS


P2P_WORDS = {
    "OK": "yes",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a driver setting",
    "U": "not known",
}


def why_unusable(*, mig: bool, fault: str | None, pids: Iterable[int], hidden_mib: int = 0) -> str | None:
    """Return why no run may use a GPU, from its driver's facts; None if it is free.

    `hidden_mib` of its memory are used by processes that the driver does not list, for example in other containers.
    """
    if fault is not None:
        return f"unhealthy: {fault}"
    if mig:
        return IN_MIG_MODE
    if busy := sorted(set(pids)):
        return "busy: pid " + ", ".join(str(pid) for pid in busy)
    return f"busy: {hidden_mib} MiB in use by a process that is not seen from here" if hidden_mib > IDLE_MIB else None


def usable_cores(topology: Topology) -> frozenset[int]:
    """Return the cores that this process may use, or else those near GPUs; empty if unknown."""
    own = {core for node in topology.numa_nodes for core in node.cores}
    return frozenset(own or {core for gpu in topology.gpus for core in gpu.cores})


def restrict(topology: Topology, visible: str | None) -> Topology:
    """Mark the GPUs outside a CUDA_VISIBLE_DEVICES as unusable; None does not restrict.

    Numbers are indices in PCI order; an empty list leaves no GPU. ProcessError for an entry that names no GPU.
    """
    if visible is None or not topology.gpus:
        return topology
    if visible.strip() in ("", "-1", "NoDevFiles"):
        disks = tuple(dataclasses.replace(disk, links=()) for disk in topology.disks)
        return dataclasses.replace(topology, gpus=(), links=(), nics=(), disks=disks)
    inside: set[int] = set()
    for entry in (word.strip() for word in visible.split(",")):
        matches = [
            gpu.index
            for gpu in topology.gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))
        ]
        if len(matches) != 1:
            if entry.startswith("MIG-"):
                raise ProcessError(f"CUDA_VISIBLE_DEVICES names {short(entry)}, a slice of a GPU in MIG mode: {MIG}")
            raise ProcessError(
                f"CUDA_VISIBLE_DEVICES names {entry!r}, which is not a GPU of this host: pass indices or UUIDs of "
                "`nvidia-smi -L`, or unset it"
            )
        inside |= set(matches)
    gpus = tuple(
        gpu
        if gpu.index in inside
        else dataclasses.replace(gpu, unusable=OUTSIDE if is_busy(gpu) else gpu.unusable or OUTSIDE)
        for gpu in topology.gpus
    )
    return dataclasses.replace(topology, gpus=gpus)


def named(topology: Topology, gpus: str | Collection[int]) -> Topology:
    """Mark the GPUs that --gpus does not name as unusable, and busy ones that it names as shared.

    GPUs that another run of hvdlaunch holds remain busy. If it names none, for example 'all', nothing is marked.
    """
    if isinstance(gpus, str):
        return topology

    def marked(gpu: Gpu) -> Gpu:
        if gpu.index not in gpus:
            return dataclasses.replace(gpu, unusable=gpu.unusable or "not named by --gpus")
        if not is_busy(gpu) or ANOTHER_RUN in (gpu.unusable or ""):
            return gpu
        return dataclasses.replace(gpu, unusable=None, shared=gpu.unusable)

    return dataclasses.replace(topology, gpus=tuple(map(marked, topology.gpus)))


def exclude_busy_gpus(topology: Topology, k: int) -> Topology:
    """Return the topology without the busy GPUs that --gpus names, if `k` others are usable."""
    if sum(gpu.unusable is None and gpu.shared is None for gpu in topology.gpus) < k:
        return topology
    gpus = tuple(dataclasses.replace(gpu, unusable=gpu.unusable or gpu.shared) for gpu in topology.gpus)
    return dataclasses.replace(topology, gpus=gpus)


def is_busy(gpu: Gpu) -> bool:
    """Return whether a GPU is unusable only because another run has it."""
    return (gpu.unusable or "").startswith("busy")


def position(topology: Topology, index: int) -> int:
    """Return the position in `Topology.gpus` of the GPU with this index.

    Raises:
        TopologyError: there is no such GPU.
    """
    for place, gpu in enumerate(topology.gpus):
        if gpu.index == index:
            return place
    indices = core_list(gpu.index for gpu in topology.gpus) or "none"
    raise TopologyError(f"{topology.source}: unknown GPU {index}; its GPUs are {indices}")


def has_switch(topology: Topology) -> bool:
    """Return whether there is an NVSwitch: then the sum of a GPU's NVLinks over its peers exceeds its own number."""
    rows = zip(topology.gpus, topology.links, strict=True)
    return any(sum(link.count for link in row) > most_nvlinks(gpu.name) for gpu, row in rows)


def most_nvlinks(gpu_name: str | None) -> int:
    """Return the number of NVLinks of a whole GPU."""
    return next((links for part, links in NVLINKS.items() if part in (gpu_name or "").upper()), MAX_NVLINKS)


def through_switch(topology: Topology) -> bool:
    """Return whether NVSwitches connect all pairs of GPUs, with equal distances."""
    links = [topology.links[a][b] for a, b in combinations(range(len(topology.gpus)), 2)]
    return has_switch(topology) and len({(link.kind, link.count) for link in links}) == 1


def to_json(topology: Topology) -> dict[str, typing.Any]:
    """Convert the topology to dicts, lists, numbers and strings; `from_json` is the inverse."""
    plain: dict[str, typing.Any] = json.loads(json.dumps(dataclasses.asdict(topology)))
    return plain


def from_json(value: object, *, name: str = "topology") -> Topology:
    """Return the topology that `to_json` has written.

    Raises:
        TopologyError: a field is missing, unknown or of another type, or links and GPUs do not match.
    """
    topology: Topology = decode(value, Topology, name)
    check(topology, name)
    return topology


def check(topology: Topology, name: str) -> None:
    """Raise TopologyError, starting with `name`, if the fields are inconsistent or impossible."""
    if topology.cpu_quota is not None and not (math.isfinite(topology.cpu_quota) and topology.cpu_quota > 0):
        raise TopologyError(f"{name}.cpu_quota: expected a positive number or null, found {topology.cpu_quota}")
    _check_links(topology, name)
    numbers = {
        **{f"gpus[{i}].cores": gpu.cores for i, gpu in enumerate(topology.gpus)},
        **{f"gpus[{i}].numa": gpu.numa for i, gpu in enumerate(topology.gpus)},
        **{f"numa_nodes[{i}]": (node.id, *node.cores) for i, node in enumerate(topology.numa_nodes)},
        **{f"disks[{i}].numa": disk.numa for i, disk in enumerate(topology.disks)},
        **{f"pcie[{i}].numa": node.numa for i, node in enumerate(topology.pcie)},
    }
    for where, values in numbers.items():
        if not all(0 <= number < MAX_CORES for number in values):
            raise TopologyError(f"{name}.{where}: expected numbers from 0 to {MAX_CORES - 1}, found {short(values)}")
    depths = [-1, *(node.depth for node in topology.pcie)]
    for i, (above, depth) in enumerate(pairwise(depths)):
        if not 0 <= depth <= above + 1:
            raise TopologyError(f"{name}.pcie[{i}].depth: expected one from 0 to {above + 1}, found {depth}")
    for i, interface in enumerate(topology.interfaces):
        try:
            IPv4Interface(interface.cidr)
        except ValueError:
            where = f"{name}.interfaces[{i}].cidr"
            raise TopologyError(f"{where}: expected one as 10.0.0.3/24, found {short(interface.cidr)}") from None


def _check_links(topology: Topology, name: str) -> None:
    indices = [gpu.index for gpu in topology.gpus]
    if indices != sorted(set(indices)) or not all(0 <= index < MAX_CORES for index in indices):
        raise TopologyError(f"{name}.gpus: expected each index once, from the lowest, found {short(indices)}")
    devices: dict[str, Sequence[Nic | Disk]] = {"nics": topology.nics, "disks": topology.disks}
    rows: Sequence[tuple[str, tuple[Link, ...]]] = [
        *((f"{name}.links[{i}]", row) for i, row in enumerate(topology.links)),
        *((f"{name}.{what}[{i}].links", own.links) for what, some in devices.items() for i, own in enumerate(some)),
    ]
    if len(topology.links) != len(indices):
        raise TopologyError(
            f"{name}.links: expected {len(indices)} rows, one for each GPU, found {len(topology.links)}"
        )
    for where, row in rows:
        if len(row) != len(indices):
            raise TopologyError(f"{where}: expected {len(indices)} links, one to each GPU, found {len(row)}")
        for i, link in enumerate(row):
            _check_link(link, f"{where}[{i}]")
    for a, row in enumerate(topology.links):
        for b, link in enumerate(row):
            if (link.kind == "X") != (a == b) or link != topology.links[b][a]:
                raise TopologyError(
                    f"{name}.links[{a}][{b}]: expected kind X for a GPU and itself alone, and the same link both ways"
                )
    for what, some in devices.items():
        if any(link.kind == "X" for device in some for link in device.links):
            raise TopologyError(f"{name}.{what}: expected no kind X, which is for a GPU and itself")


def _check_link(link: Link, where: str) -> None:
    counts = {"NV": range(1, 1000), "X": range(1)} | dict.fromkeys(PCIE_KINDS, range(1))
    if link.kind not in counts:
        raise TopologyError(f"{where}.kind: expected {', '.join(counts)}, found {link.kind!r}")
    if link.count not in counts[link.kind]:
        raise TopologyError(f"{where}.count: {link.count} does not go with {link.kind}")
    if link.gbps is not None and not (math.isfinite(link.gbps) and link.gbps > 0):
        raise TopologyError(f"{where}.gbps: expected a positive number or null, found {link.gbps}")
