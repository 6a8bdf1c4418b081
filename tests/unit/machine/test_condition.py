import os
import resource
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvdtrain.checkpoint.folder import open_folder
from hvdtrain.settings.safety.exits import BadInput
from launch.machine import condition
from launch.machine.condition import Inspection, open_inspection, read_condition
from tests.unit.machines import SOFTWARE


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No settings but those of a test."""
    for name in [name for name in os.environ if condition.SETTING.fullmatch(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(condition, "NCCL_FILES", (str(tmp_path / "own.conf"), str(tmp_path / "system.conf")))
    monkeypatch.setattr(condition, "read_software", lambda: SOFTWARE)


def test_a_look_leaves_a_file_in_the_run_folder_as_long_as_it_lasts(tmp_path):
    with open_inspection(tmp_path / "runs", tmp_path / "data") as inspection:
        assert inspection.folders == (str(tmp_path / "runs"), str(tmp_path / "data"))
        assert [str(file) for file in tmp_path.iterdir()] == [inspection.token]  # runs is not there yet
        assert read_condition(inspection).sees_token is True
        elsewhere = Inspection(folders=inspection.folders, token=f"{inspection.token}-of-another-folder")
        assert read_condition(elsewhere).sees_token is False
    assert list(tmp_path.iterdir()) == []
    with open_inspection(tmp_path) as inspection:
        Path(inspection.token).unlink()  # by somebody else


def test_where_no_file_can_be_made_nobody_knows_whether_the_folder_is_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(condition.tempfile, "mkstemp", Mock(side_effect=OSError(28, "No space left on device")))
    with open_inspection(tmp_path) as inspection:
        assert (inspection.token, read_condition(inspection).sees_token) == (None, None)


def test_folders_are_there_or_on_the_way_and_only_the_run_folder_is_tried(tmp_path):
    paths = tuple(map(str, (tmp_path, tmp_path / "a/b", "/proc/none")))
    found = read_condition(Inspection(folders=paths, token=None)).folders
    assert tuple(folder.path for folder in found) == paths
    assert [(folder.there, folder.writable) for folder in found] == [(True, True), (False, None), (False, None)]
    free = os.statvfs(tmp_path)
    assert found[0].free_mib == pytest.approx(free.f_bavail * free.f_frsize >> 20, rel=0.1)
    assert found[2].free_mib is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "writable"), [("runs", True), ("a/b/runs", True), ("file", False), ("file/runs", False), ("/proc", False)]
)
def test_check_and_run_agree_on_which_folder_can_be_written(tmp_path, place, writable):
    (tmp_path / "file").touch()
    [folder] = read_condition(Inspection(folders=(str(tmp_path / place),), token=None)).folders
    assert folder.writable is writable
    with nullcontext() if writable else pytest.raises(BadInput, match="cannot be written"):
        os.close(open_folder(tmp_path / place / "effnet/mine", overwrite=False).descriptor)


def test_settings_are_those_of_the_environment_and_of_nccls_files_without_secrets(tmp_path, monkeypatch):
    (tmp_path / "own.conf").write_text("# mine\nNCCL_DEBUG=INFO\nNCCL_IB_DISABLE = 1\n\nOTHER=2\n")
    (tmp_path / "system.conf").write_text("NCCL_DEBUG=WARN\nNCCL_P2P_LEVEL=SYS\n#NCCL_X=1\n")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_RANK", "3")  # of another process
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "s3cret!")
    found = read_condition(Inspection(folders=(), token=None)).settings
    assert [(one.name, one.value, one.source) for one in found] == [
        ("HOROVOD_CYCLE_TIME", "5", "its environment"),
        ("NCCL_DEBUG", "INFO", str(tmp_path / "own.conf")),
        ("NCCL_IB_DISABLE", "0", "its environment"),
        ("NCCL_P2P_LEVEL", "SYS", str(tmp_path / "system.conf")),
    ]


@pytest.mark.parametrize(
    ("limit", "capabilities", "mib"),
    [(8 << 20, "0", 8), (resource.RLIM_INFINITY, "0", None), (8 << 20, "0000000000004000", None)],
)
def test_locked_memory_is_in_mib_and_has_no_limit_for_who_may_lock_all(monkeypatch, tmp_path, limit, capabilities, mib):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"CapInh:\t0\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(condition, "ROOT", tmp_path)
    monkeypatch.setattr(condition.resource, "getrlimit", lambda _: (limit, limit))
    assert read_condition(Inspection(folders=(), token=None)).locked_memory_mib == mib


def test_a_host_without_dev_shm(monkeypatch, tmp_path):
    assert read_condition(Inspection(folders=(), token=None)).shm_free_mib is not None
    monkeypatch.setattr(condition, "SHM", str(tmp_path / "none"))
    assert read_condition(Inspection(folders=(), token=None)).shm_free_mib is None
