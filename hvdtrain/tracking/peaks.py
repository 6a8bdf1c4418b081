"""Peak memory of each rank, and of all ranks, in MiB."""

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

_MIB = 2**20


def process_peaks(device: torch.device) -> dict[str, float]:
    """Return this process's peaks so far: resident, and on a GPU what torch allocated and reserved.

    Resident is VmHWM of proc(5) if the kernel provides it (gVisor does not), because ru_maxrss of getrusage(2) is
    inherited from the parent process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    resident_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else int(peak)
    peaks = {"resident_mib": resident_kib / 1024}
    if device.type == "cuda":
        peaks["gpu_allocated_mib"] = torch.cuda.max_memory_allocated(device) / _MIB
        peaks["gpu_reserved_mib"] = torch.cuda.max_memory_reserved(device) / _MIB
    return {name: round(mib, 1) for name, mib in peaks.items()}


def highest_peaks(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the highest of each peak, and as `<name>_rank` the first rank that has it."""
    peaks: dict[str, float] = {}
    for name in by_rank[0]:
        rank = max(range(len(by_rank)), key=lambda number: by_rank[number][name])
        peaks |= {name: by_rank[rank][name], f"{name.removesuffix('_mib')}_rank": rank}
    return peaks
