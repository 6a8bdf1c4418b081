"""A topology as text and aligned tables, for the user."""

from collections.abc import Callable

from launch.cores import core_list
from launch.errors import TopologyError, harmless
from launch.machine.topology import (
    P2P_WORDS,
    PCIE_KINDS,
    Disk,
    Gpu,
    Link,
    Nic,
    PeerAccess,
    Topology,
    position,
    through_switch,
)

MEANINGS = {
    "PIX": "PCIe, at most one switch between",
    "PXB": "PCIe, several switches but not the CPU between",
    "PHB": "PCIe, through the CPU's host bridge",
    "NODE": "PCIe, through host bridges of one NUMA node",
    "SYS": "PCIe, and on through the link between NUMA nodes or CPU sockets",
}


def link_word(link: Link) -> str:
    """Format a link like nvidia-smi: NV12, PIX, X."""
    return f"NV{link.count}" if link.kind == "NV" else link.kind


def describe_pair(topology: Topology, a: int, b: int) -> str:
    """Describe the link between GPUs `a` and `b` (indices), and its speed, in one to three sentences.

    Raises:
        TopologyError: no such GPU, or `a` equals `b`.
    """
    if a == b:
        raise TopologyError(f"a pair is two GPUs; GPU {a} is named twice")
    first, second = (topology.gpus[position(topology, index)] for index in (a, b))
    link = topology.links[position(topology, a)][position(topology, b)]
    speed = f"{link.gbps:g} GB/s one way." if link.gbps is not None else _why_no_speed(link, first, second)
    sentences = [f"GPU {a} and GPU {b} are connected by {_way(link, through_switch(topology))}: {speed}"]
    if not link.p2p:
        sentences.append("The driver does not let them copy straight to each other (no P2P).")
    if first.numa and first.numa == second.numa:
        sentences.append(f"Both are at NUMA node {core_list(first.numa)}.")
    elif first.numa and second.numa:
        nodes = core_list(first.numa), core_list(second.numa)
        sentences.append(f"GPU {a} is at NUMA node {nodes[0]}, GPU {b} at {nodes[1]}.")
    sentences += [f"GPU {gpu.index} cannot be used: {gpu.unusable}." for gpu in (first, second) if gpu.unusable]
    return harmless(" ".join(sentences))


def table(topology: Topology) -> str:
    """Format a whole topology as aligned text that ends with a newline."""
    if not topology.gpus:
        blocks = [harmless(f"No GPU ({topology.source})")]
    else:
        kinds = sorted({gpu.name for gpu in topology.gpus if gpu.name})
        title = f"{_many(len(topology.gpus), 'GPU')} ({topology.source})"
        blocks = [harmless(f"{title}: {', '.join(kinds)}" if kinds else title), _matrix(topology), _legend(topology)]
        if any(link.gbps is not None for row in topology.links for link in row):
            blocks.append(
                "GB/s one way\n" + _grid(topology, lambda link: "-" if link.gbps is None else f"{link.gbps:g}")
            )
        blocks += [_gpus(topology)]
    blocks += [_disks(topology), _pcie(topology)]
    if topology.numa_nodes:
        nodes = [[str(node.id), core_list(node.cores) or "none"] for node in topology.numa_nodes]
        blocks.append(aligned([["NUMA node", "usable cores"], *nodes]))
    if topology.interfaces:
        rows = [[own.name, own.cidr, str(own.speed_mbps or "unknown")] for own in topology.interfaces]
        blocks.append(aligned([["interface", "address", "Mb/s"], *rows]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def peer_table(access: PeerAccess) -> str:
    """Format the P2P support between GPUs as aligned text that ends with a newline."""
    rows = [[f"GPU{gpu}", *row] for gpu, row in zip(access.gpus, access.words, strict=True)]
    used = [f"  {key:<3}  {meaning}" for key, meaning in P2P_WORDS.items() if any(key in row for row in access.words)]
    title = f"May these GPUs copy straight to each other? ({access.source})"
    header = ["", *(f"GPU{gpu}" for gpu in access.gpus)]
    return "\n".join([harmless(title), "", aligned([header, *rows]), "", *used]) + "\n"


def nearest(topology: Topology, device: Nic | Disk) -> tuple[str, tuple[int, ...]]:
    """Return the kind of the best link between a NIC or a disk and a GPU, and the indices of the GPUs with it."""
    kinds = [link.kind for link in device.links]
    best = min(kinds, key=PCIE_KINDS.index)
    return best, tuple(gpu.index for gpu, kind in zip(topology.gpus, kinds, strict=True) if kind == best)


def _way(link: Link, switched: bool) -> str:
    if link.kind == "NV":
        return f"{_many(link.count, 'NVLink')}{' through NVSwitch' if switched else ''}"
    return f"{link.kind} ({MEANINGS[link.kind]})"


def _why_no_speed(link: Link, *ends: Gpu) -> str:
    unnamed = [gpu for gpu in ends if gpu.name is None]
    if link.kind == "SYS" and not unnamed:
        return "how fast is not known for this CPU or GPU."
    if not unnamed:
        return f"how fast is not known for {' and '.join(sorted({gpu.name or '' for gpu in ends}))}."
    if link.kind == "SYS":
        return "how fast is not known, it depends on the CPU."
    return "how fast is not known, the text does not name the GPU's model (--gpu-name)."


def _matrix(topology: Topology) -> str:
    header = ["", *(f"GPU{gpu.index}" for gpu in topology.gpus), *(nic.name for nic in topology.nics)]
    rows = [
        [f"GPU{gpu.index}", *map(link_word, [*topology.links[place], *(nic.links[place] for nic in topology.nics)])]
        for place, gpu in enumerate(topology.gpus)
    ]
    return aligned([header, *rows])


def _grid(topology: Topology, show: Callable[[Link], str]) -> str:
    names = [f"GPU{gpu.index}" for gpu in topology.gpus]
    rows = [[name, *map(show, row)] for name, row in zip(names, topology.links, strict=True)]
    return aligned([["", *names], *rows])


def _legend(topology: Topology) -> str:
    rows = [*topology.links, *(device.links for device in topology.devices)]
    kinds = {link.kind for row in rows for link in row}
    lines = [f"  {kind:<4}  {MEANINGS[kind]}" for kind in PCIE_KINDS if kind in kinds]
    if "NV" in kinds:
        lines.insert(0, f"  NV#   # NVLinks{' through NVSwitch' if through_switch(topology) else ''}")
    return "\n".join(lines)


def _gpus(topology: Topology) -> str:
    """Return a line for each GPU; columns that are not used for binding are left out if no value is known."""
    near: dict[int, list[str]] = {gpu.index: [] for gpu in topology.gpus}
    for nic in topology.nics:
        kind, indices = nearest(topology, nic)
        if kind != "SYS":
            for index in indices:
                near[index].append(f"{nic.name} ({kind})")
    columns: dict[str, list[str]] = {
        "GPU": [str(gpu.index) for gpu in topology.gpus],
        "NUMA": [core_list(gpu.numa) or "unknown" for gpu in topology.gpus],
        "cores": [core_list(gpu.cores) or "unknown" for gpu in topology.gpus],
        "PCI": [gpu.pci or "" for gpu in topology.gpus],
        "UUID": [gpu.uuid or "" for gpu in topology.gpus],
        "not usable": [gpu.unusable or "" for gpu in topology.gpus],
        "drawbacks": ["; ".join(gpu.drawbacks) for gpu in topology.gpus],
        "NICs near it": [", ".join(names) if len(names) < 5 else f"{len(names)}" for names in near.values()],
    }
    known = {title: cells for title, cells in columns.items() if any(cells)}
    return aligned([list(known), *([cell or "-" for cell in row] for row in zip(*known.values(), strict=True))])


def _disks(topology: Topology) -> str:
    """Return a line for each NVMe disk, with its link to each GPU."""
    rows = [
        [disk.name, disk.pci, core_list(disk.numa) or "unknown", *map(link_word, disk.links)] for disk in topology.disks
    ]
    return aligned([["disk", "PCI", "NUMA", *(f"GPU{gpu.index}" for gpu in topology.gpus)], *rows]) if rows else ""


def _pcie(topology: Topology) -> str:
    """Return the PCIe tree, with a line for each root complex, switch and device."""
    rows = [
        [
            f"{'  ' * node.depth}{node.address}",
            node.device or ("switch" if node.depth else "root complex"),
            core_list(node.numa) or "-",
            f"PCIe {node.generation} x{node.lanes}" if node.generation and node.lanes else "-",
        ]
        for node in topology.pcie
    ]
    return aligned([["PCIe", "device", "NUMA", "link"], *rows]) if rows else ""


def aligned(rows: list[list[str]]) -> str:
    """Align rows of cells; each column is as wide as its widest cell."""
    rows = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
