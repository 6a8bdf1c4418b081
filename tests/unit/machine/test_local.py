import time

import pytest

from launch.errors import ProcessError
from launch.machine import local, nvml
from launch.process import Answer
from tests.unit.machines import PIX4, machine


def test_a_driver_that_wakes_up_slowly_has_so_long(monkeypatch):
    monkeypatch.setattr(nvml, "read_nvml", lambda: time.sleep(0.2) or machine())
    with pytest.raises(ProcessError, match=r"^NVML did not .* 0\.1 s.*--driver-timeout-s"):
        local.local_topology(gpus=True, timeout_s=0.1)
    assert len(local.local_topology(gpus=True, timeout_s=5).gpus) == 4


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
    assert local.local_topology(gpus=True, timeout_s=1).source == "a machine"
    assert commands == []
    monkeypatch.setattr(nvml, "read_nvml", lambda: None)
    assert len(local.local_topology(gpus=True, timeout_s=1).gpus) == gpus
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
    gpus = local.local_topology(gpus=True, timeout_s=1).gpus
    assert [gpu.unusable for gpu in gpus] == ["busy: pid 77", "unhealthy: GPU is lost."]
    answers["--query-gpu"] = Answer(status=2, out="Field is not valid\n", err="")
    with pytest.raises(ProcessError, match="nvidia-smi topo -m failed with status 15"):
        local.local_topology(gpus=True, timeout_s=1)
