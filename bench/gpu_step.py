"""A step of a plain loop on one device: time, kernels and memory, as it is or with one thing changed.

    python bench/gpu_step.py OUT efficientnet_b0:224:256:bf16 efficientnet_b0:224:256:bf16:graph

A case is model:pixels:batch:precision, and what is changed: `contiguous` instead of channels_last, `inplace` SiLU,
`compile`, `graph` (the whole step as one CUDA graph). For bench/gpu_day.py.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.vision import models

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
WARMUP, STEPS, ROUNDS = (6, 10, 5) if CUDA else (1, 1, 1)


def step_of(case: str) -> Callable[[], None]:
    """One optimizer step over images that stay on the device."""
    name, pixels, batch, precision, *changes = case.split(":")
    torch.manual_seed(0)
    layout = torch.contiguous_format if "contiguous" in changes else torch.channels_last
    model = models.build(name, classes=1000).to(DEVICE, memory_format=layout).train()
    for module in model.modules():
        if "inplace" in changes and isinstance(module, nn.SiLU):
            module.inplace = True
    if "compile" in changes:
        model.compile()
    images = torch.randn(int(batch), 3, int(pixels), int(pixels), device=DEVICE).to(memory_format=layout)
    labels = torch.randint(1000, (int(batch),), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)
    scaler = GradScaler(DEVICE.type, enabled=precision == "fp16")
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return captured(step) if "graph" in changes and CUDA else step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, after the steps on another stream that torch wants before it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measure(case: str) -> dict[str, Any]:
    """The median of rounds; kernels are those of one step, without copies and fills."""
    step, times_ms = step_of(case), []
    for _ in range(WARMUP):
        step()
    for _ in range(ROUNDS):
        wait()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        times_ms.append((time.perf_counter() - started) * 1000 / STEPS)
    step_ms = statistics.median(times_ms)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    with torch.profiler.profile() as profile:
        step()
        wait()
    ran = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    return {
        "ms": step_ms,
        "from, to": [min(times_ms), max(times_ms)],
        "samples/s": int(case.split(":")[2]) / step_ms * 1000,
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in ran),
        "GiB": peak_gib,
    }


def main() -> None:
    out, *cases = sys.argv[1:]
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found: dict[str, Any] = {}
    for case in cases:
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found[case] = measure(case)
        except torch.cuda.OutOfMemoryError:
            found[case] = "out of memory"
        print(case, found[case], flush=True)
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
