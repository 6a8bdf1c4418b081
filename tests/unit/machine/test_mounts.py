from pathlib import Path

import pytest

from launch.machine.mounts import storage_of

MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 9:0 / /scratch rw - xfs /dev/md0 rw
31 22 0:40 / /old rw - tmpfs tmpfs rw
32 22 253:0 / /old rw - ext4 /dev/mapper/vg-old rw
33 22 0:41 / /home rw - nfs4 server:/home rw
34 22 0:42 /@data /data rw - btrfs /dev/nvme10n1 rw
36 22 7:7 / /lost rw - ext4 /dev/loop7 rw
37 30 259:3 / /scratch/with\040space rw - ext4 /dev/nvme3n1 rw
"""


@pytest.fixture
def root(tmp_path):
    """A host: a partition, a RAID of a partition and a whole disk, a volume on that RAID, and plain disks."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS.lstrip())
    block = tmp_path / "sys/devices/block"
    plain = "nvme0n1/nvme0n1p2 nvme2n1/nvme2n1p1 nvme1n1 nvme10n1 nvme3n1 md0/slaves dm-0/slaves"
    for place in plain.split():
        (block / place).mkdir(parents=True)
    for partition in ("nvme0n1/nvme0n1p2", "nvme2n1/nvme2n1p1"):
        (block / partition / "partition").write_text("1\n")
    for member, place in {"md0": "nvme2n1/nvme2n1p1 nvme1n1", "dm-0": "md0"}.items():
        for one in place.split():
            (block / member / "slaves" / one.rpartition("/")[2]).symlink_to(block / one)
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/class/block").mkdir(parents=True)
    numbers = {"259:2": "nvme0n1/nvme0n1p2", "9:0": "md0", "253:0": "dm-0", "259:3": "nvme3n1"}
    for number, place in numbers.items():
        (tmp_path / "sys/dev/block" / number).symlink_to(block / place)
    (tmp_path / "sys/class/block/nvme10n1").symlink_to(block / "nvme10n1")
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "file_system", "disks"),
    [
        ("/nowhere/runs", "ext4", ["nvme0n1"]),
        ("/scratch/runs", "xfs", ["nvme1n1", "nvme2n1"]),
        ("/scratch/with space/runs", "ext4", ["nvme3n1"]),
        ("/old", "ext4", ["nvme1n1", "nvme2n1"]),  # mounted over another
        ("/older", "ext4", ["nvme0n1"]),
        ("/home/me", "nfs4", []),
        ("/data", "btrfs", ["nvme10n1"]),
        ("/lost", "ext4", []),
    ],
)
def test_finds_the_disks_of_a_folder(root, folder, file_system, disks):
    assert storage_of(Path(folder), root) == (file_system, tuple(disks))


def test_nothing_is_known_where_the_kernel_shows_no_mounts(tmp_path):
    assert storage_of(tmp_path, tmp_path) == (None, ())
