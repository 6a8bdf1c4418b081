"""Which GPUs are held, by locks as launch.rank.bind takes them: tests/unit/rank/test_bind.py."""

import fcntl
import os

import pytest

from launch.machine import local, locks
from launch.rank import bind
from tests.unit.machines import machine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def lock(file):
    file.touch()
    held = os.open(file, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def test_both_ends_know_the_same_folder():
    assert locks.LOCKS == bind.LOCKS


def test_a_gpu_is_held_as_long_as_its_file_is_locked(folder):
    assert locks.held(["GPU-a"]) == frozenset()
    folder.mkdir(mode=0o700)
    held = [lock(folder / name) for name in ("GPU-a.lock", "GPU-c.lock", "_etc_x.lock")]
    (folder / "GPU-b.lock").touch()
    try:
        assert locks.held(["GPU-a", "GPU-b", "GPU-d", "/etc/x"]) == {"GPU-a", "/etc/x"}
    finally:
        for file in held:
            os.close(file)
    assert locks.held(["GPU-a"]) == frozenset()


@pytest.mark.parametrize("foreign", ["link", "file", "owner"])
def test_a_folder_that_is_not_ours_tells_nothing(folder, tmp_path, monkeypatch, foreign):
    real = tmp_path / "real"
    real.mkdir()
    held = lock(real / "GPU-a.lock")
    if foreign == "link":
        folder.symlink_to(real)
    elif foreign == "file":
        folder.touch()
    else:
        real.rename(folder)
        monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert locks.held(["GPU-a"]) == frozenset()
    os.close(held)


def test_gpus_that_are_held_are_busy(monkeypatch):
    whole = machine(unusable={1: "in MIG mode"})
    monkeypatch.setattr(local.nvml, "read_nvml", lambda: whole)
    monkeypatch.setattr(local.locks, "held", lambda uuids: {"GPU-1111", "GPU-3333", "GPU-x"} & set(uuids))
    told = [gpu.unusable for gpu in local.local_topology(gpus=True, timeout_s=5).gpus]
    assert told == [None, "in MIG mode", None, "busy: another run of yours holds it"]
