"""A topology as text and aligned tables, for the user."""

from launch.cores import core_list
from launch.errors import TopologyError, harmless
from launch.machine.nvidia import P2P_WORDS
from launch.machine.topology import PCIE_KINDS, Disk, Link, Nic, PeerAccess, Topology, position, through_switch

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

    TopologyError if there is no such GPU, or if `a` equals `b`.
    """
    if a == b:
        raise TopologyError(f"a pair is two GPUs; GPU {a} is named twice")
    first, second = (topology.gpus[position(topology, index)] for index in (a, b))
    link = topology.links[position(topology, a)][position(topology, b)]
    names = sorted({gpu.name for gpu in (first, second) if gpu.name is not None})
    if link.gbps is not None:
        speed = f"{link.gbps:g} GB/s one way."
    elif None in (first.name, second.name):
        why = "it depends on the CPU." if link.kind == "SYS" else "the text does not name the GPU's model (--gpu-name)."
        speed = f"how fast is not known, {why}"
    else:
        speed = f"how fast is not known for {'this CPU or GPU' if link.kind == 'SYS' else ' and '.join(names)}."
    way = f"{link.kind} ({MEANINGS[link.kind]})" if link.kind in MEANINGS else _nvlinks(topology, link)
    sentences = [f"GPU {a} and GPU {b} are connected by {way}: {speed}"]
    if not link.p2p:
        sentences.append("The driver does not let them copy straight to each other (no P2P).")
    if first.numa and first.numa == second.numa:
        sentences.append(f"Both are at NUMA node {core_list(first.numa)}.")
    elif first.numa and second.numa:
        sentences.append(f"GPU {a} is at NUMA node {core_list(first.numa)}, GPU {b} at {core_list(second.numa)}.")
    sentences += [f"GPU {gpu.index} cannot be used: {gpu.unusable}." for gpu in (first, second) if gpu.unusable]
    return harmless(" ".join(sentences))


def _nvlinks(topology: Topology, link: Link) -> str:
    through = " through NVSwitch" if through_switch(topology) else ""
    return f"{link.count} NVLink{'s' * (link.count != 1)}{through}"


def table(topology: Topology) -> str:
    """Format a whole topology as aligned text that ends with a newline."""
    size = len(topology.gpus)
    models = sorted({gpu.name for gpu in topology.gpus if gpu.name})
    title = f"{size or 'No'} GPU{'s' * (size > 1)} ({topology.source}){': ' * bool(models)}{', '.join(models)}"
    names = [f"GPU{gpu.index}" for gpu in topology.gpus]
    blocks = [harmless(title)]
    if topology.gpus:
        rows = [
            [name, *map(link_word, [*topology.links[place], *(nic.links[place] for nic in topology.nics)])]
            for place, name in enumerate(names)
        ]
        blocks += [aligned([["", *names, *(nic.name for nic in topology.nics)], *rows]), _legend(topology)]
    if any(link.gbps is not None for row in topology.links for link in row):
        rows = [
            [name, *("-" if link.gbps is None else f"{link.gbps:g}" for link in row)]
            for name, row in zip(names, topology.links, strict=True)
        ]
        blocks.append("GB/s one way\n" + aligned([["", *names], *rows]))
    if topology.gpus:
        blocks.append(_gpus(topology))
    disks = [
        [disk.name, disk.pci, core_list(disk.numa) or "unknown", *map(link_word, disk.links)] for disk in topology.disks
    ]
    pcie = [
        [
            f"{'  ' * node.depth}{node.address}",
            node.device or ("switch" if node.depth else "root complex"),
            core_list(node.numa) or "-",
            f"PCIe {node.generation} x{node.lanes}" if node.generation and node.lanes else "-",
        ]
        for node in topology.pcie
    ]
    numa = [[str(node.id), core_list(node.cores) or "none"] for node in topology.numa_nodes]
    interfaces = [[own.name, own.cidr, str(own.speed_mbps or "unknown")] for own in topology.interfaces]
    blocks += [
        aligned([header, *rows])
        for header, rows in (
            (["disk", "PCI", "NUMA", *names], disks),
            (["PCIe", "device", "NUMA", "link"], pcie),
            (["NUMA node", "usable cores"], numa),
            (["interface", "address", "Mb/s"], interfaces),
        )
        if rows
    ]
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


def aligned(rows: list[list[str]]) -> str:
    """Align rows of cells; each column is as wide as its widest cell."""
    rows = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
