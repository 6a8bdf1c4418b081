"""What a host's devices say about themselves: GPUs by NVML, cores and memory by psutil."""

import contextlib
import math
import socket
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import psutil
import pynvml

Readings = dict[str, float]

_GIB = 2**30
_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
# How the GPUs of a host become one number where there are too many to show each.
_TOGETHER: dict[str, Callable[[Sequence[float]], float]] = {
    "utilisation_percent": statistics.fmean,
    "memory_gib": max,
    "power_w": sum,
    "temperature_c": max,
}


class Gauges:
    """The last readings of a host, taken every `period_s` by a thread: NVML may take its time, training does not wait.

    What `read` finds at first decides the names; what it lacks later is NaN, as is all before the thread's first turn.
    """

    def __init__(self, read: Callable[[], Readings], *, period_s: float = 2.0) -> None:
        self._read = read
        self._period_s = period_s
        self._last: Readings = {}
        self.names = tuple(read())
        if self.names:
            threading.Thread(target=self._keep_reading, name="gauges", daemon=True).start()

    def latest(self) -> list[float]:
        """The last reading, in the order of `names`."""
        last = self._last
        return [last.get(name, math.nan) for name in self.names]

    def _keep_reading(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._period_s):
            self._last = self._read()


def none() -> Readings:
    """For a rank that leaves its host to another."""
    return {}


def of_host(gpu_uuids: Iterable[str], *, each: bool) -> Callable[[], Readings]:
    """Reads this host's cores, memory, and those GPUs; `each` tells them apart, else they are one number.

    Utilisation in percent, memory in GiB, power in W, temperature in degrees Celsius. A GPU or a counter that NVML
    does not know is left out.
    """
    host = f"usage/{socket.gethostname()}"
    handles = _handles(gpu_uuids)

    def read() -> Readings:
        readings = {}
        with contextlib.suppress(OSError, psutil.Error):
            readings[f"{host}/cpu_percent"] = psutil.cpu_percent()
            readings[f"{host}/memory_gib"] = psutil.virtual_memory().used / _GIB
        if each:
            for index, handle in handles:
                readings |= {f"{host}/gpu{index}_{name}": value for name, value in _of_gpu(handle).items()}
            return readings
        together: dict[str, list[float]] = defaultdict(list)
        for _, handle in handles:
            for name, value in _of_gpu(handle).items():
                together[name].append(value)
        return readings | {f"{host}/gpu_{name}": float(_TOGETHER[name](found)) for name, found in together.items()}

    return read


def _handles(gpu_uuids: Iterable[str]) -> list[tuple[int, object]]:
    found = []
    with contextlib.suppress(*_ERRORS):
        pynvml.nvmlInit()
        for uuid in gpu_uuids:
            with contextlib.suppress(*_ERRORS):
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                found.append((pynvml.nvmlDeviceGetIndex(handle), handle))
    return sorted(found, key=lambda one: one[0])


def _of_gpu(handle: object) -> Readings:
    counters: dict[str, Callable[[], float]] = {
        "utilisation_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB,
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }
    readings = {}
    for name, read in counters.items():
        with contextlib.suppress(*_ERRORS):
            readings[name] = float(read())
    return readings
