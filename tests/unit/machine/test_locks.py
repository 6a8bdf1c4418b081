"""Which GPUs are held, by locks as launch.rank.bind takes them: tests/unit/rank/test_bind.py."""

import os

import pytest

from launch.machine import local
from launch.rank import bind
from tests.unit.locked import locked
from tests.unit.machines import machine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_both_ends_know_the_same_folder_and_the_same_lock():
    assert local.LOCKS == bind.LOCKS
    assert local.FLOCK.format == bind.FLOCK.format


def test_a_gpu_is_held_by_the_process_that_has_locked_its_file(folder):
    assert local.held_gpus(["GPU-a"]) == {}
    folder.mkdir(mode=0o700)
    (folder / "GPU-b.lock").touch()
    with locked(*(folder / name for name in ("GPU-a.lock", "GPU-c.lock", "_etc_x.lock"))) as pid:
        assert local.held_gpus(["GPU-a", "GPU-b", "GPU-d", "/etc/x"]) == {"GPU-a": pid, "/etc/x": pid}
    assert local.held_gpus(["GPU-a"]) == {}


@pytest.mark.parametrize("foreign", ["link", "file", "owner"])
def test_a_folder_that_is_not_ours_tells_nothing(folder, tmp_path, monkeypatch, foreign):
    real = tmp_path / "real"
    real.mkdir()
    with locked(real / "GPU-a.lock"):
        if foreign == "link":
            folder.symlink_to(real)
        elif foreign == "file":
            folder.touch()
        else:
            real.rename(folder)
            monkeypatch.setattr(os, "getuid", lambda: 4242)
        assert local.held_gpus(["GPU-a"]) == {}


def test_gpus_that_are_held_are_busy(monkeypatch):
    whole = machine(unusable={0: "busy: pid 5", 1: "in MIG mode", 3: "busy: pid 7, 8"})
    monkeypatch.setattr(local.nvml, "read_nvml", lambda: whole)
    held = {"GPU-1111": 7, "GPU-2222": 0, "GPU-3333": 7}
    monkeypatch.setattr(local, "held_gpus", lambda uuids: {uuid: held[uuid] for uuid in uuids if uuid in held})
    told = [gpu.unusable for gpu in local.local_topology(gpus=True, timeout_s=5).gpus]
    unseen = "busy: another run of yours holds it"  # as out of a container
    assert told == ["busy: pid 5", "in MIG mode", unseen, "busy: pid 7, another run of yours"]
