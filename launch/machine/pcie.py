"""The PCIe tree, from the kernel: root complexes, switches, and the GPUs, adapters and disks behind them."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from launch.machine import system
from launch.machine.topology import Disk, Link, PcieNode, Topology

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s of a lane
_DISPLAY = "0x03"  # prefix of a GPU's class


def with_pcie(topology: Topology, sysfs: Path) -> Topology:
    """Add the NVMe disks, and the PCIe tree of disks, GPUs and adapters."""
    gpus = [system.pci_device(sysfs, gpu.pci) for gpu in topology.gpus]
    disks = nvme_disks(sysfs)
    named_gpus = ((f"GPU{gpu.index}", folder) for gpu, folder in zip(topology.gpus, gpus, strict=True))
    return replace(
        topology,
        disks=tuple(
            Disk(
                name=name,
                pci=folder.name,
                numa=system.numa_of(folder),
                links=tuple(Link(kind=system.pcie_kind(folder, gpu)) for gpu in gpus),
            )
            for name, folder in disks
        ),
        pcie=_tree([*((name, gpu) for name, gpu in named_gpus if gpu), *system.rdma_devices(sysfs), *disks]),
    )


def nvme_disks(sysfs: Path) -> list[tuple[str, Path]]:
    """Return name and PCI folder of each NVMe disk, nvme2n1 before nvme10n1, without disks over a network."""
    found: dict[str, Path] = {}
    for controller in (sysfs / "class/nvme").glob("nvme*"):
        device = (controller / "device").resolve()
        if system.bridges(device):
            for namespace in controller.glob("nvme*n*"):
                # nvme0c1n1 is the path to nvme0n1 through controller 1, for a disk with several controllers.
                found.setdefault(re.sub(r"c\d+(?=n\d+$)", "", namespace.name), device)
    return sorted(found.items(), key=lambda disk: system.natural(disk[0]))


def _tree(devices: Iterable[tuple[str, Path]]) -> tuple[PcieNode, ...]:
    nodes: dict[tuple[str, ...], PcieNode] = {}
    for name, folder in devices:
        above = {parent.name: parent for parent in folder.parents}
        way = _way(folder)
        for depth, address in enumerate(way):
            nodes.setdefault(way[: depth + 1], _node(above[address], depth, None))
        nodes[(*way, folder.name, name)] = _node(folder, len(way), name)
    return tuple(node for _, node in sorted(nodes.items()))


def _way(device: Path) -> tuple[str, ...]:
    """Return the root complex, and the upstream port of each switch, down to a device.

    Below a root complex is one of its ports, below that a switch's upstream port, then one of its downstream ports,
    perhaps the next switch. A device may contain a root complex of its own (Intel's VMD).
    """
    way, below = [], 0
    for part in system.bridges(device):
        below = 0 if part.startswith("pci") else below + 1
        if below % 2 == 0:
            way.append(part)
    return tuple(way)


def _node(folder: Path, depth: int, device: str | None) -> PcieNode:
    # An idle GPU lowers the speed of its link, so the current speed is not meaningful.
    which = "max" if system.read(folder / "class").startswith(_DISPLAY) else "current"
    speed = re.match(r"[0-9.]+(?= GT/s)", system.read(folder / f"{which}_link_speed"))  # 16.0 GT/s PCIe
    lanes = system.read(folder / "current_link_width")
    return PcieNode(
        depth=depth,
        address=folder.name,
        device=device,
        numa=system.numa_of(folder),
        generation=_GENERATIONS.get(float(speed[0])) if speed else None,
        lanes=int(lanes) if lanes.isdecimal() and 0 < int(lanes) <= 32 else None,
    )
