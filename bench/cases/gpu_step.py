"""A step on one device: time, kernels and memory, unchanged or with one thing changed; for a BERT, a run of hvdtrain.

A step is model:pixels:batch:precision, with tokens instead of pixels for a BERT, and the change: `contiguous` instead
of channels_last, `inplace` SiLU, `compile`, `graph` (the whole step as one CUDA graph). On a CPU, one round finds
errors.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from bench.jobs import job
from bench.pairs import Case, Table
from bench.sides import fast_kernels, is_text
from hvdtrain.tasks.vision import models

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
WARMUP, STEPS, ROUNDS = (6, 10, 5) if CUDA else (1, 1, 1)


def step_of(case: str) -> Callable[[], None]:
    """Return one optimizer step of a plain loop, over images that stay on the device."""
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
    dtype = {"tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return captured(step) if "graph" in changes and CUDA else step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture the step as a CUDA graph, after the steps on another stream that torch requires first."""
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


def times_ms(step: Callable[[], None]) -> list[float]:
    """Return the mean step of each round."""
    found = []
    for count in [WARMUP, *[STEPS] * ROUNDS]:
        wait()
        started = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        found.append((time.perf_counter() - started) * 1000 / count)
    return found[1:]


def kernels_of(step: Callable[[], None]) -> int:
    """Count the kernels of one step, without copies and fills."""
    with torch.profiler.profile() as profile:
        step()
        wait()
    ran = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in ran)


def rank(out: Path, *, case: str) -> None:
    """Run as a separate process, so that memory reserved by one case does not count for the next one."""
    fast_kernels()
    try:
        step = step_of(case)
        found: dict[str, Any] = {"times_ms": times_ms(step)}
        found["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None
        found["kernels"] = kernels_of(step)
    except torch.cuda.OutOfMemoryError:
        found = {}
    out.write_text(json.dumps(found))


def of_text(case: str) -> dict[str, Any]:
    """Run hvdtrain over masked words; GiB are the memory that torch has reserved."""
    model, tokens, batch, precision = case.split(":")
    given: dict[str, Any] = {"model": model, "tokens": int(tokens), "batch": int(batch), "precision": precision}
    answer = job([], "sides:ours", steps=ROUNDS * STEPS, **given)
    reserved_mib = answer["memory"][0].get("gpu_reserved_mib")
    gib = None if reserved_mib is None else round(reserved_mib / 1024, 2)
    return {"times_ms": [1000 * one for one in answer["step_s"]], "GiB": gib, "kernels": None}


def kernels(chosen: argparse.Namespace) -> Table:
    """Time, kernels and memory of a step on one device, optionally with one thing changed."""
    table = Table(
        name="kernels",
        question="A step on one device; its time is the median of rounds:",
        columns=["step", "ms", "from, to", "samples/s", "kernels", "GiB"],
    )
    for case in chosen.steps:
        found = of_text(case) if is_text(case) else job([], "cases.gpu_step:rank", case=case)
        if not found:
            table.add(case, "out of memory", None, None, None, None)
            continue
        ms, batch = statistics.median(found["times_ms"]), int(case.split(":")[2])
        spread = f"{min(found['times_ms']):.4g} to {max(found['times_ms']):.4g}"
        table.add(case, round(ms, 2), spread, round(1000 * batch / ms, 1), found["kernels"], found["GiB"])
    return table


CASES = {"kernels": Case(measure=kernels, options={"steps": ["efficientnet_b0:224:64:bf16"]})}
