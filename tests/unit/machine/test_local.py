import os
import time

import pytest

from launch.errors import ProcessError
from launch.machine import local, nvml
from launch.process import Answer
from launch.run.rank import bind
from tests.unit.locked import locked
from tests.unit.machines import PIX4, machine


def test_a_driver_that_wakes_up_slowly_has_so_long(monkeypatch):
    monkeypatch.setattr(nvml, "read_nvml", lambda: time.sleep(0.2) or machine())
    monkeypatch.setattr(local, "DRIVER_TIMEOUT_S", 0.1)
    with pytest.raises(ProcessError, match=r"^NVML did not .* 0\.1 s.*nvidia-smi -pm 1"):
        local.local_topology(gpus=True)
    monkeypatch.setattr(local, "DRIVER_TIMEOUT_S", 5)
    assert len(local.local_topology(gpus=True).gpus) == 4


@pytest.mark.parametrize(
    ("answer", "gpus"), [(Answer(status=0, out=PIX4, err=""), 4), (Answer(status=9, out="", err="no"), 0)]
)
def test_nvidia_smi_answers_only_where_nvml_cannot_be_loaded(monkeypatch, answer, gpus):
    commands = []

    def ask(argv, *, timeout_s):
        commands.append(argv[1])
        return answer if argv[1] == "topo" else Answer(status=1, out="", err="")

    monkeypatch.setattr(local, "find", lambda name: f"/bin/{name}")
    monkeypatch.setattr(local, "ask", ask)
    monkeypatch.setattr(nvml, "read_nvml", machine)
    assert local.local_topology(gpus=True).source == "a machine"
    assert commands == []
    monkeypatch.setattr(nvml, "read_nvml", lambda: None)
    assert len(local.local_topology(gpus=True).gpus) == gpus
    assert commands[0] == "topo"


def test_nvidia_smi_that_fails_because_of_a_lost_gpu_gives_the_others(monkeypatch):
    lost = "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.\n"
    answers = {
        "topo": Answer(status=15, out=lost, err=""),
        "--query-gpu": Answer(status=15, out="0, GPU-aa, A100, 00000000:07:00.0, Disabled\n", err=lost),
        "--query-compute-apps": Answer(status=15, out="GPU-aa, 77\n", err=lost),
    }
    monkeypatch.setattr(local, "find", lambda name: f"/bin/{name}")
    monkeypatch.setattr(local, "ask", lambda argv, **_: answers[argv[1].partition("=")[0]])
    monkeypatch.setattr(nvml, "read_nvml", lambda: None)
    gpus = local.local_topology(gpus=True).gpus
    assert [gpu.unusable for gpu in gpus] == ["busy: pid 77", "unhealthy: GPU is lost."]
    answers["--query-gpu"] = Answer(status=2, out="Field is not valid\n", err="")
    with pytest.raises(ProcessError, match="nvidia-smi topo -m failed with status 15"):
        local.local_topology(gpus=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_both_ends_know_the_same_folder_and_the_same_lock():
    assert local.LOCKS == bind.LOCKS
    assert local.FLOCK.format == bind.FLOCK.format


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
    told = [gpu.unusable for gpu in local.local_topology(gpus=True).gpus]
    unseen = "busy: another run of yours holds it"  # as out of a container
    assert told == ["busy: pid 5", "in MIG mode", unseen, "busy: pid 7, another run of yours"]
