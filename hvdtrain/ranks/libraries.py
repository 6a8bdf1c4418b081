"""What is below Python: GPUs, and the versions of their driver, of CUDA, NCCL and MPI."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import pynvml

T = TypeVar("T")


def library_versions() -> dict[str, str | None]:
    """By name; None where there is none, and the driver's without a visible GPU. Starts neither CUDA nor MPI."""
    import torch

    return {"nccl": _nccl(), "cuda": torch.version.cuda, "nvidia_driver": _driver(), "mpi": _mpi()}


def _nccl() -> str | None:
    from torch.cuda import nccl

    try:
        return ".".join(str(part) for part in nccl.version())
    except AttributeError:  # a torch without CUDA
        return None


def _driver() -> str | None:
    """By NVML: asking CUDA itself would start it, before this rank has chosen its GPU."""
    import torch

    if torch.cuda.device_count() == 0:
        return None
    return _from_nvml(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def sees_gpus() -> bool:
    """Whether torch will find a GPU, without its import, which takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or version("torch").endswith("+cpu"):
        return False
    return bool(_from_nvml(pynvml.nvmlDeviceGetCount))


def _from_nvml(ask: Callable[[], T]) -> T | None:
    """The answer of NVML; None where there is no driver."""
    try:
        pynvml.nvmlInit()
        try:
            return ask()
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _mpi() -> str | None:
    """The one that this process has joined: to import it would start it. Where it was built is left out."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return None
    first = str(mpi.Get_library_version()).splitlines()[0]
    return " ".join(first.partition(",")[0].split())
