"""The disks of a folder, through mounts, partitions, volumes and RAIDs."""

import re
from pathlib import Path

from launch.machine.system import natural, read


def storage_of(folder: Path, root: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the file system of an existing folder (such as ext4), and the whole disks below it (such as nvme0n1).

    No disks are returned for a network file system such as nfs4, or if they are hidden, for example by the overlay of a
    container.
    """
    place, deepest, file_system, disks = folder.resolve(), 0, None, frozenset[str]()
    for line in read(root / "proc/self/mountinfo").splitlines():  # proc(5): id parent major:minor root point ... - type
        mount, _, what = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= deepest:  # a later mount covers an earlier one
            deepest, (file_system, source) = len(point.parts), what.split()[:2]
            disks = _disks(_block_device(root / "sys", mount.split()[2], source))
    return file_system, tuple(sorted(disks, key=natural))


def _block_device(sysfs: Path, numbers: str, source: str) -> Path:
    """Return the kernel's folder of a block device by its numbers, or by name for btrfs, whose numbers are virtual."""
    if numbers.startswith("0:") and source.startswith("/dev/"):
        return (sysfs / "class/block" / Path(source).resolve().name).resolve()
    return (sysfs / "dev/block" / numbers).resolve()


def _disks(device: Path) -> frozenset[str]:
    """Return the whole disks below a block device; empty for an unknown device."""
    if members := list((device / "slaves").glob("*")):  # of a RAID, or of a volume
        return frozenset().union(*(_disks(member.resolve()) for member in members))
    if not device.is_dir():
        return frozenset()
    return frozenset({device.parent.name if (device / "partition").exists() else device.name})
