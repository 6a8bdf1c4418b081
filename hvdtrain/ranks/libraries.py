"""The versions of what is below Python: NCCL, CUDA, the GPUs' driver, MPI."""

import sys

import pynvml


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
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
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
