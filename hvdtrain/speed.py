"""Measure a matrix product and a memory copy on each GPU of this host at once, or on its cores.

python -m hvdtrain.speed SECONDS [GPU,...]      GPUs as CUDA_VISIBLE_DEVICES names them; prints one line of JSON

`hvdlaunch check` starts this on all hosts at once, and compares them.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MARK = "hvdtrain-speed "
WARM_UP = 0.2  # of the measured time: clocks rise, and pages are touched


class Load(NamedTuple):
    """The work that measures a kind of device."""

    dtype: str
    side: int  # of the square matrices
    copied_mib: int
    queued: int  # calls before the host waits for them


ON_GPU, ON_CORES = Load("float16", 8192, 1024, 8), Load("float32", 1024, 256, 1)


def main(seconds: str, gpus: str = "") -> None:
    """Print a list with the name, TFLOP/s and GB/s of each device, in the order of `gpus`."""
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
    import torch

    from hvdtrain.ranks.cores import count_host_cores

    if not gpus:
        torch.set_num_threads(count_host_cores(1))
    devices = [f"cuda:{index}" for index in range(len(gpus.split(",")))] if gpus else ["cpu"]
    with ThreadPoolExecutor(len(devices)) as pool:
        measured = list(pool.map(lambda device: measure(device, float(seconds)), devices))
    print(f"{MARK}{json.dumps(measured)}", flush=True)


def measure(device: str, seconds: float) -> dict[str, str | float]:
    """Return the name of a device, and what it reaches in `seconds` of each kind of work."""
    import torch

    load = ON_GPU if device.startswith("cuda") else ON_CORES
    a, b = (torch.rand(load.side, load.side, dtype=getattr(torch, load.dtype), device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(load.copied_mib << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if load is ON_GPU:
            torch.cuda.synchronize(device)

    products_per_s = rate(lambda: torch.mm(a, b, out=product), wait, load.queued, seconds)
    copies_per_s = rate(lambda: target.copy_(source), wait, load.queued, seconds)
    cores = f"{torch.get_num_threads()} cores, {processor()}"
    return {
        "name": torch.cuda.get_device_name(device) if load is ON_GPU else cores,
        "tflops": products_per_s * 2 * load.side**3 / 1e12,
        "gb_per_s": copies_per_s * 2 * source.nbytes / 1e9,  # read and written
    }


def rate(work: Callable[[], object], wait: Callable[[], None], queued: int, seconds: float) -> float:
    """Return how often per second `work` is done, after a warm-up."""
    for limit_s in (WARM_UP * seconds, seconds):
        begin, count = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - begin) < limit_s:
            for _ in range(queued):
                work()
            wait()
            count += queued
    return count / elapsed_s


def processor() -> str:
    """Return the model of this host's processor, or its architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, os.uname().machine)


if __name__ == "__main__":
    main(*sys.argv[1:])
