from pathlib import Path

import pytest

from launch.machine.condition import file_system_of

MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 9:0 / /scratch rw - xfs /dev/md0 rw
31 22 0:40 / /old rw - tmpfs tmpfs rw
32 22 253:0 / /old rw - ext4 /dev/mapper/vg-old rw
33 22 0:41 / /home rw - nfs4 server:/home rw
34 22 0:42 /@data /data rw - btrfs /dev/nvme10n1 rw
37 30 259:3 / /scratch/with\040space rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "file_system"),
    [
        ("/nowhere/runs", "ext4"),
        ("/scratch/runs", "xfs"),
        ("/scratch/with space/runs", "tmpfs"),
        ("/old", "ext4"),  # mounted over another
        ("/older", "ext4"),
        ("/home/me", "nfs4"),
        ("/data", "btrfs"),
    ],
)
def test_finds_the_file_system_of_a_folder(tmp_path, folder, file_system):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS.lstrip())
    assert file_system_of(Path(folder), tmp_path) == file_system


def test_nothing_is_known_where_the_kernel_shows_no_mounts(tmp_path):
    assert file_system_of(tmp_path, tmp_path) is None
