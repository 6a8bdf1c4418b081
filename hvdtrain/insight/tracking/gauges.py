"""Readings of a host's devices: GPUs through NVML, cores and memory through psutil; and peaks of memory by rank."""

import contextlib
import math
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import pynvml
import torch

from hvdtrain.loop.reports import MOST_CURVES
from hvdtrain.ranks.comm import Comm

Readings = dict[str, float]

_MIB, _GIB = 2**20, 2**30
_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
# The counters of a GPU, and how those of a host's GPUs are combined if there are too many to show each.
_COUNTERS: dict[str, tuple[Callable[[object], float], Callable[[Iterable[float]], float]]] = {
    "utilisation_percent": (lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu, statistics.fmean),
    "memory_gib": (lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB, max),
    "power_w": (lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000, sum),
    "temperature_c": (lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU), max),
}


class Gauges:
    """The latest readings of a host, taken every `period_s` by a thread, so that training never waits for NVML.

    The first call of `read` determines the names. Readings that are missing later are NaN, and so are all before the
    thread's first turn.
    """

    def __init__(self, read: Callable[[], Readings], *, period_s: float = 2.0) -> None:
        self._read = read
        self._period_s = period_s
        self._readings: Readings = {}
        self.names = tuple(read())
        if self.names:
            threading.Thread(target=self._read_forever, name="gauges", daemon=True).start()

    def latest(self) -> list[float]:
        """Return the latest readings, in the order of `names`."""
        readings = self._readings
        return [readings.get(name, math.nan) for name in self.names]

    def _read_forever(self) -> None:
        while True:
            time.sleep(self._period_s)
            self._readings = self._read()


def host_reader(gpu_uuids: Iterable[str], *, per_gpu: bool) -> Callable[[], Readings]:
    """Return a function that reads this host's cores, memory and these GPUs, individually if `per_gpu`.

    Utilisation is in percent, memory in GiB, power in W, temperature in degrees Celsius. GPUs and counters that NVML
    does not support are left out.
    """
    host = f"usage/{socket.gethostname()}"
    handles = _handles(gpu_uuids)

    def read() -> Readings:
        readings = {}
        with contextlib.suppress(OSError, psutil.Error):
            readings[f"{host}/cpu_percent"] = psutil.cpu_percent()
            readings[f"{host}/memory_gib"] = psutil.virtual_memory().used / _GIB
        for name, (count, combine) in _COUNTERS.items():
            values = {}
            for index, handle in handles.items():
                with contextlib.suppress(*_ERRORS):
                    values[index] = float(count(handle))
            if per_gpu:
                readings |= {f"{host}/gpu{index}_{name}": value for index, value in values.items()}
            elif values:
                readings[f"{host}/gpu_{name}"] = float(combine(values.values()))
        return readings

    return read


def _handles(gpu_uuids: Iterable[str]) -> dict[int, object]:
    """Return NVML's handles of these GPUs by index."""
    handles = {}
    with contextlib.suppress(*_ERRORS):
        pynvml.nvmlInit()
        for uuid in gpu_uuids:
            with contextlib.suppress(*_ERRORS):
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                handles[pynvml.nvmlDeviceGetIndex(handle)] = handle
    return handles


def open_gauges(comm: Comm, device: torch.device) -> Gauges:
    """Return this rank's gauges: the first local rank of each host reads its GPUs."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    host = socket.gethostname()
    uuids = [other for other_host, other in comm.allgather([host, uuid]) if other_host == host and other is not None]
    if comm.local_rank != 0:
        return Gauges(dict)  # another rank reads this host
    return Gauges(host_reader(uuids, per_gpu=comm.size <= MOST_CURVES))


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
