"""Libraries below Python: GPUs, and the versions of their driver, CUDA, NCCL and MPI."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import pynvml

T = TypeVar("T")


def library_versions() -> dict[str, str | None]:
    """Return the versions by name; None if absent, or for the driver without a GPU. Starts neither CUDA nor MPI."""
    import torch

    return {"nccl": _nccl(), "cuda": torch.version.cuda, "nvidia_driver": _driver(), "mpi": _mpi()}


def _nccl() -> str | None:
    from torch.cuda import nccl

    try:
        return ".".join(str(part) for part in nccl.version())
    except AttributeError:  # torch without CUDA
        return None


def _driver() -> str | None:
    """Return the driver's version from NVML: CUDA would start before this rank has chosen its GPU."""
    import torch

    if torch.cuda.device_count() == 0:
        return None
    return _from_nvml(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def sees_gpus() -> bool:
    """Return whether torch will find a GPU, without importing it, which takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or version("torch").endswith("+cpu"):
        return False
    return bool(_from_nvml(pynvml.nvmlDeviceGetCount))


def _from_nvml(ask: Callable[[], T]) -> T | None:
    """Query NVML; return None without a driver."""
    try:
        pynvml.nvmlInit()
        try:
            return ask()
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _mpi() -> str | None:
    """Return the MPI that this process has already joined (an import would start it), without its build location."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return None
    first = str(mpi.Get_library_version()).splitlines()[0]
    return " ".join(first.partition(",")[0].split())
