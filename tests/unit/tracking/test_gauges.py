import math
import socket
import threading
import time
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from hvdtrain.tracking.gauges import Gauges, host_reader

HOST = f"usage/{socket.gethostname()}"
GIB = 2**30


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs behind NVML's functions; the second does not support power readings."""
    gpus = {
        "GPU-aa": SimpleNamespace(index=3, busy=90, used=2 * GIB, milliwatts=250_000, celsius=60),
        "GPU-bb": SimpleNamespace(index=1, busy=50, used=3 * GIB, milliwatts=None, celsius=70),
    }

    def handle(uuid):
        if uuid not in gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpus[uuid]

    def power(gpu):
        if gpu.milliwatts is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.milliwatts

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetIndex": lambda gpu: gpu.index,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.busy),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=gpu.used),
        "nvmlDeviceGetPowerUsage": power,
        "nvmlDeviceGetTemperature": lambda gpu, _: gpu.celsius,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return gpus


def of_gpus(readings):
    return {name.removeprefix(f"{HOST}/"): value for name, value in readings.items() if "gpu" in name}


def test_each_gpu_by_its_index_and_without_unsupported_readings(nvml):
    of_host = host_reader([], per_gpu=True)()
    assert 0 <= of_host[f"{HOST}/cpu_percent"] <= 100
    assert 0 < of_host[f"{HOST}/memory_gib"] < psutil.virtual_memory().total / GIB
    assert {name[:4] for name in of_gpus(host_reader(["bb"], per_gpu=True)())} == {"gpu1"}  # of this run
    assert of_gpus(host_reader(["aa", "bb", "gone"], per_gpu=True)()) == {
        "gpu1_utilisation_percent": 50.0,
        "gpu1_memory_gib": 3.0,
        "gpu1_temperature_c": 70.0,
        "gpu3_utilisation_percent": 90.0,
        "gpu3_memory_gib": 2.0,
        "gpu3_power_w": 250.0,
        "gpu3_temperature_c": 60.0,
    }


def test_the_gpus_of_a_host_together(nvml):
    nvml["GPU-bb"].milliwatts = 100_000
    assert of_gpus(host_reader(["aa", "bb"], per_gpu=False)()) == {
        "gpu_utilisation_percent": 70.0,
        "gpu_memory_gib": 3.0,
        "gpu_power_w": 350.0,
        "gpu_temperature_c": 70.0,
    }


def test_gpus_lost_on_the_way_are_nan(nvml, monkeypatch):
    read = host_reader(["aa"], per_gpu=True)
    found = Gauges(read, period_s=0.01)
    assert any("gpu3" in name for name in found.names)

    def lost(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    for name in ("UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lost)
    wait(lambda: all(math.isnan(value) == ("gpu" in name) for name, value in latest(found).items()))


def latest(found):
    return dict(zip(found.names, found.latest(), strict=True))


def wait(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_readings_come_from_a_thread_and_nothing_waits_for_it():
    turns, begun, go_on = [], threading.Event(), threading.Event()

    def read():
        turns.append(1)
        if len(turns) == 2:
            begun.wait(20)
        if len(turns) == 3:
            go_on.wait(20)
        return {"a": float(len(turns))}

    found = Gauges(read, period_s=0.01)
    assert math.isnan(found.latest()[0])  # before the first turn
    begun.set()
    wait(lambda: len(turns) == 3)
    started = time.perf_counter()
    assert found.latest() == [2.0]
    assert time.perf_counter() - started < 0.5
    go_on.set()
    wait(lambda: found.latest()[0] > 3)
