import math
import socket
from queue import SimpleQueue
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from hvdtrain.insight.tracking.gauges import Gauges, host_reader
from tests.unit.run.supervise.test_screen import until

HOST = f"usage/{socket.gethostname()}"
GIB = 2**30


COUNTERS = {
    "UtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.busy),
    "MemoryInfo": lambda gpu: SimpleNamespace(used=gpu.used),
    "PowerUsage": lambda gpu: gpu.milliwatts,
    "Temperature": lambda gpu, _: gpu.celsius,
}


def unsupported(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs behind NVML's functions."""
    gpus = {
        "GPU-aa": SimpleNamespace(index=3, busy=90, used=2 * GIB, milliwatts=250_000, celsius=60),
        "GPU-bb": SimpleNamespace(index=1, busy=50, used=3 * GIB, milliwatts=100_000, celsius=70),
    }
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: gpus.get(uuid) or unsupported())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetIndex", lambda gpu: gpu.index)
    for name, answer in COUNTERS.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer)


def of_gpus(readings):
    return {name.removeprefix(f"{HOST}/"): value for name, value in readings.items() if "gpu" in name}


def test_each_gpu_by_its_index_and_without_unsupported_readings(nvml, monkeypatch):
    of_host = host_reader([], per_gpu=True)()
    assert 0 <= of_host[f"{HOST}/cpu_percent"] <= 100
    assert 0 < of_host[f"{HOST}/memory_gib"] < psutil.virtual_memory().total / GIB
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetPowerUsage", lambda gpu: gpu.milliwatts if gpu.index == 3 else unsupported()
    )
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
    assert of_gpus(host_reader(["aa", "bb"], per_gpu=False)()) == {
        "gpu_utilisation_percent": 70.0,
        "gpu_memory_gib": 3.0,
        "gpu_power_w": 350.0,
        "gpu_temperature_c": 70.0,
    }


def test_gpus_lost_on_the_way_are_nan(nvml, monkeypatch):
    found = Gauges(host_reader(["aa"], per_gpu=True), period_s=0.01)
    assert sum("gpu3" in name for name in found.names) == 4
    for name in COUNTERS:
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", unsupported)
    until(
        lambda: all(
            math.isnan(value) == ("gpu" in name) for name, value in zip(found.names, found.latest(), strict=True)
        )
    )


def test_readings_come_from_a_thread_and_nothing_waits_for_it():
    answers = SimpleQueue()
    answers.put({"a": 1.0})
    found = Gauges(answers.get, period_s=0.01)
    assert math.isnan(found.latest()[0])  # before the first turn
    for value in (2.0, 3.0):
        answers.put({"a": value})
        until(lambda value=value: found.latest() == [value])  # then the thread waits for the next one
