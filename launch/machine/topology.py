"""GPUs, links, NUMA nodes, NICs and disks of one host."""

import dataclasses
import json
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface
from itertools import combinations, pairwise

from launch.cores import MAX_CORES, core_list
from launch.errors import ProcessError, TopologyError
from launch.machine import nvidia
from launch.machine.decode import decode, short

PCIE_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first
# MiB that a GPU without a run may use: a driver counts 256 of its firmware as used (NVIDIA/open-gpu-kernel-modules
# issue 357), and a training rank uses more than this.
IDLE_MIB = 1024
IN_MIG_MODE = "in MIG mode"
ANOTHER_RUN = "another run of yours"  # which holds a GPU by a lock that the driver does not know
OUTSIDE = f"outside your {nvidia.VISIBLE}"


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

    @property
    def pairs(self) -> dict[tuple[int, int], Link]:
        """The link of each pair of GPUs, by their positions."""
        return {(a, b): self.links[a][b] for a, b in combinations(range(len(self.gpus)), 2)}

    @property
    def free(self) -> int:
        """The number of GPUs that ranks can use."""
        return sum(gpu.unusable is None for gpu in self.gpus)

    def only(self, places: Sequence[int]) -> "Topology":
        """Return the topology with the GPUs at these positions alone."""

        def kept(links: tuple[Link, ...]) -> tuple[Link, ...]:
            return tuple(links[place] for place in places)

        return dataclasses.replace(
            self,
            gpus=tuple(self.gpus[place] for place in places),
            links=tuple(kept(self.links[place]) for place in places),
            nics=tuple(dataclasses.replace(nic, links=kept(nic.links)) for nic in self.nics),
            disks=tuple(dataclasses.replace(disk, links=kept(disk.links)) for disk in self.disks),
        )

    def marked(self, mark: Callable[[Gpu], str | None]) -> "Topology":
        """Return the topology in which each GPU is unusable for the reason that `mark` returns."""
        gpus = tuple(dataclasses.replace(gpu, unusable=mark(gpu)) for gpu in self.gpus)
        return dataclasses.replace(self, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """P2P support between GPUs, from `nvidia-smi topo -p2p`, which does not show how they are connected."""

    source: str
    gpus: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]  # [from][to], by position in gpus: X (itself) or one of nvidia.P2P_WORDS


def why_unusable(*, mig: bool, fault: str | None, pids: Iterable[int], hidden_mib: int = 0) -> str | None:
    """Return why no run may use a GPU, from its driver's facts; None if it is free.

    A pid of 0 is unknown. `hidden_mib` of its memory are used by processes that the driver does not list, perhaps in
    other containers.
    """
    if fault is not None:
        return f"unhealthy: {fault}"
    if mig:
        return IN_MIG_MODE
    if busy := sorted(set(pids)):
        return "busy: pid " + ", ".join(str(pid or "unknown") for pid in busy)
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
    if visible.strip() in nvidia.NONE_VISIBLE:
        return dataclasses.replace(topology.only(()), nics=())
    inside: set[int] = set()
    for entry in (word.strip() for word in visible.split(",")):
        is_uuid = entry.startswith(nvidia.UUID)
        gpus = [gpu.index for gpu in topology.gpus if is_uuid and (gpu.uuid or "").startswith(entry)]
        gpus += [gpu.index for gpu in topology.gpus if entry == str(gpu.index)]
        if len(gpus) != 1 and entry.startswith(nvidia.SLICE):
            raise ProcessError(f"{nvidia.VISIBLE} names {short(entry)}, a slice of a GPU in MIG mode: {nvidia.MIG}")
        if len(gpus) != 1:
            raise ProcessError(
                f"{nvidia.VISIBLE} names {entry!r}, which is not a GPU of this host: pass indices or UUIDs of "
                "`nvidia-smi -L`, or unset it"
            )
        inside |= set(gpus)

    def mark(gpu: Gpu) -> str | None:
        return gpu.unusable if gpu.index in inside else OUTSIDE if is_busy(gpu) else gpu.unusable or OUTSIDE

    return topology.marked(mark)


def named(topology: Topology, gpus: str | Collection[int]) -> Topology:
    """Mark the GPUs that --gpus does not name as unusable, and busy ones that it names as shared.

    GPUs that another run of hvdlaunch holds remain busy. If it names none, for example 'all', nothing is marked.
    """
    if isinstance(gpus, str):
        return topology

    def share(gpu: Gpu) -> Gpu:
        if gpu.index not in gpus:
            return dataclasses.replace(gpu, unusable=gpu.unusable or "not named by --gpus")
        if not is_busy(gpu) or ANOTHER_RUN in (gpu.unusable or ""):
            return gpu
        return dataclasses.replace(gpu, unusable=None, shared=gpu.unusable)

    return dataclasses.replace(topology, gpus=tuple(map(share, topology.gpus)))


def exclude_busy_gpus(topology: Topology, k: int) -> Topology:
    """Return the topology without the busy GPUs that --gpus names, if `k` others are usable."""
    if sum(gpu.unusable is None and gpu.shared is None for gpu in topology.gpus) < k:
        return topology
    return topology.marked(lambda gpu: gpu.unusable or gpu.shared)


def is_busy(gpu: Gpu) -> bool:
    """Return whether a GPU is unusable only because another run has it."""
    return (gpu.unusable or "").startswith("busy")


def position(topology: Topology, index: int) -> int:
    """Return the position in `Topology.gpus` of the GPU with this index; TopologyError if there is none."""
    for place, gpu in enumerate(topology.gpus):
        if gpu.index == index:
            return place
    indices = core_list(gpu.index for gpu in topology.gpus) or "none"
    raise TopologyError(f"{topology.source}: unknown GPU {index}; its GPUs are {indices}")


def has_switch(topology: Topology) -> bool:
    """Return whether there is an NVSwitch: then the sum of a GPU's NVLinks over its peers exceeds its own number."""
    rows = zip(topology.gpus, topology.links, strict=True)
    return any(sum(link.count for link in row) > nvidia.most_nvlinks(gpu.name) for gpu, row in rows)


def through_switch(topology: Topology) -> bool:
    """Return whether NVSwitches connect all pairs of GPUs, with equal distances."""
    return has_switch(topology) and len({(link.kind, link.count) for link in topology.pairs.values()}) == 1


def link_between(kind: str, count: int, ends: Sequence[nvidia.NcclSpeeds], sockets_gbps: float | None) -> Link:
    """Return a link between two GPUs with the speed of its slowest part; no speed if a part is unknown."""
    parts: list[float | None] = [end.pcie_gbps for end in ends] + ([sockets_gbps] if kind == "SYS" else [])
    if kind == "NV":
        parts = [end.nvlink_gbps and count * end.nvlink_gbps for end in ends]
    known = [part for part in parts if part is not None and kind != "X"]
    return Link(kind=kind, count=count, gbps=round(min(known), 1) if len(known) == len(parts) else None)


def to_json(topology: Topology) -> dict[str, typing.Any]:
    """Convert the topology to dicts, lists, numbers and strings; `from_json` is the inverse."""
    plain: dict[str, typing.Any] = json.loads(json.dumps(dataclasses.asdict(topology)))
    return plain


def from_json(value: object, *, name: str = "topology") -> Topology:
    """Return the topology that `to_json` has written; TopologyError if a field is missing, unknown or impossible."""
    topology: Topology = decode(value, Topology, name)
    check(topology, name)
    return topology


def check(topology: Topology, name: str) -> None:
    """Raise TopologyError, starting with `name`, if the fields are inconsistent or impossible."""

    def require(holds: bool, where: str, expected: str, found: object = None) -> None:
        if not holds:
            end = "" if found is None else f", found {found if isinstance(found, float) else short(found)}"
            raise TopologyError(f"{name}.{where}: expected {expected}{end}")

    indices, size = [gpu.index for gpu in topology.gpus], len(topology.gpus)
    quota = topology.cpu_quota
    require(quota is None or quota > 0, "cpu_quota", "a positive number or null", quota)
    in_order = indices == sorted(set(indices)) and all(0 <= index < MAX_CORES for index in indices)
    require(in_order, "gpus", "each index once, from the lowest", indices)
    rows = len(topology.links)
    require(rows == size, "links", f"{size} rows, one for each GPU", rows)
    of_devices = {f"nics[{i}].links": nic.links for i, nic in enumerate(topology.nics)}
    of_devices |= {f"disks[{i}].links": disk.links for i, disk in enumerate(topology.disks)}
    for where, row in ({f"links[{i}]": row for i, row in enumerate(topology.links)} | of_devices).items():
        require(len(row) == size, where, f"{size} links, one to each GPU", len(row))
        for i, link in enumerate(row):
            require(link.kind in ("NV", "X", *PCIE_KINDS), f"{where}[{i}].kind", "NV, X, PIX, PXB...", link.kind)
            fits = 0 < link.count < 1000 if link.kind == "NV" else not link.count
            require(fits, f"{where}[{i}].count", f"one that goes with {link.kind}", link.count)
            require(link.gbps is None or link.gbps > 0, f"{where}[{i}].gbps", "a positive number or null", link.gbps)
    for a, row in enumerate(topology.links):
        for b, link in enumerate(row):
            both_ways = (link.kind == "X") == (a == b) and link == topology.links[b][a]
            require(both_ways, f"links[{a}][{b}]", "X for a GPU and itself alone, and the same link both ways")
    for where, row in of_devices.items():
        require(all(link.kind != "X" for link in row), where, "no kind X, which is for a GPU and itself")
    numbers = {
        **{f"gpus[{i}].cores": gpu.cores for i, gpu in enumerate(topology.gpus)},
        **{f"gpus[{i}].numa": gpu.numa for i, gpu in enumerate(topology.gpus)},
        **{f"numa_nodes[{i}]": (node.id, *node.cores) for i, node in enumerate(topology.numa_nodes)},
        **{f"disks[{i}].numa": disk.numa for i, disk in enumerate(topology.disks)},
        **{f"pcie[{i}].numa": node.numa for i, node in enumerate(topology.pcie)},
    }
    for where, values in numbers.items():
        in_range = all(0 <= number < MAX_CORES for number in values)
        require(in_range, where, f"numbers from 0 to {MAX_CORES - 1}", values)
    for i, (above, depth) in enumerate(pairwise([-1, *(node.depth for node in topology.pcie)])):
        require(0 <= depth <= above + 1, f"pcie[{i}].depth", f"one from 0 to {above + 1}", depth)
    for i, interface in enumerate(topology.interfaces):
        try:
            IPv4Interface(interface.cidr)
        except ValueError:
            require(False, f"interfaces[{i}].cidr", "one as 10.0.0.3/24", interface.cidr)
