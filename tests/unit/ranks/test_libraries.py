import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hvdtrain.ranks import libraries
from hvdtrain.ranks.libraries import library_versions, sees_gpus


def nvml(monkeypatch, *, gpus=1, fails=None):
    """Make believe that there is such a driver with so many visible GPUs; returns what was asked of it."""
    asked = []

    def answer(question, value=None):
        asked.append(question)
        if question == fails:
            raise libraries.pynvml.NVMLError(libraries.pynvml.NVML_ERROR_UNKNOWN)
        return value

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(libraries.pynvml, name, lambda name=name: answer(name))
    monkeypatch.setattr(libraries.pynvml, "nvmlSystemGetDriverVersion", lambda: answer("driver", "580.65.06"))
    monkeypatch.setattr(libraries.pynvml, "nvmlDeviceGetCount", lambda: answer("count", gpus))
    return asked


def test_the_driver_is_nvmls_and_cuda_is_not_started_for_it(monkeypatch):
    asked = nvml(monkeypatch, gpus=0)
    assert (library_versions()["nvidia_driver"], asked) == (None, [])
    started = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: started.append(1))
    asked = nvml(monkeypatch)
    assert library_versions()["nvidia_driver"] == "580.65.06"
    assert (asked, started) == (["nvmlInit", "driver", "nvmlShutdown"], [])
    asked = nvml(monkeypatch, fails="driver")
    assert (library_versions()["nvidia_driver"], asked[-1]) == (None, "nvmlShutdown")


@pytest.mark.parametrize(
    ("gpus", "visible", "torch_version", "fails", "seen"),
    [
        (1, "0", "2.11.0+cu130", None, True),
        (0, None, "2.11.0", None, False),
        (8, "", "2.11.0", None, False),  # as hvdlaunch --gpus none has it
        (8, None, "2.11.0+cpu", None, False),
        (8, None, "2.11.0", "nvmlInit", False),
    ],
)
def test_gpus_that_torch_will_find_are_seen_without_it(monkeypatch, *, gpus, visible, torch_version, fails, seen):
    nvml(monkeypatch, gpus=gpus, fails=fails)
    monkeypatch.setattr(libraries, "version", lambda _: torch_version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sees_gpus() is seen


@pytest.mark.parametrize(("answer", "version"), [((2, 28, 9), "2.28.9"), (AttributeError(), None)])
def test_nccl_and_cuda_are_torchs(monkeypatch, answer, version):
    nvml(monkeypatch, gpus=0)
    monkeypatch.setattr(torch.cuda.nccl, "version", Mock(side_effect=[answer]))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = library_versions()
    assert (found["nccl"], found["cuda"]) == (version, "13.0")


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("Open MPI v4.1.8, package: Open MPI me@there Distribution, ident: 4.1.8\0", "Open MPI v4.1.8"),
        ("MPICH Version:      4.1.2\nMPICH Release date: Wed Jun  7\n", "MPICH Version: 4.1.2"),
    ],
)
def test_mpi_is_named_without_where_it_was_built_and_not_started_for_that(monkeypatch, says, version):
    nvml(monkeypatch, gpus=0)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert library_versions()["mpi"] is None
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Get_library_version=lambda: says))
    assert library_versions()["mpi"] == version
